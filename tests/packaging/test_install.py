# SPDX-License-Identifier: Apache-2.0
"""Installation: from a wheel and in place, backends/ arrives as hyper_parallel.backends.

Each install goes into an environment of its own that borrows torch from the running one.
Nothing is built in the source tree, and nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]
# What the interpreter of a fresh environment reports about the names it is given.
PROBE = """
import importlib, importlib.metadata, importlib.util, json, sys
files = {name: importlib.import_module(name).__file__ for name in sys.argv[1:]}
meta = importlib.metadata.metadata("hyper-parallel")
points = importlib.metadata.entry_points(group="hyper_parallel.backends")
print(json.dumps({
    "files": files,
    "version": meta["Version"],
    "top_level_backends": importlib.util.find_spec("backends") is not None,
    "own_entry_points": [p.name for p in points if p.dist.name == "hyper-parallel"],
    "scripts": [p.value for p in importlib.metadata.entry_points(name="hyper-parallel")],
}))
"""


def run(command: list[str], cwd: Path) -> str:
    """Run a command that must succeed; return what it printed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copy what a build reads, so that it leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source")
    clutter = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("hyper_parallel", "backends"):
        shutil.copytree(ROOT / name, copy / name, ignore=clutter)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """Build the wheel."""
    out = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(out), str(source)], cwd=out)
    (built,) = out.glob("*.whl")
    return built


def install(folder: Path, *what: str) -> Path:
    """Install into a new environment; return its interpreter."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = sysconfig.get_path("purelib", scheme="venv", vars=paths)
    run([*PIP, "install", *OFFLINE, "--target", site, *what], cwd=folder)
    # A path file is not read for further path files: our own editable install stays behind.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return folder / "bin" / "python"


def probe(python: Path, *names: str) -> dict:
    """Import names in an environment, away from the tree; return what PROBE reports."""
    return json.loads(run([str(python), "-I", "-c", PROBE, *names], cwd=python.parent))


def backend_names() -> list[str]:
    """Return the installed name of every backend; importing one needs no device."""
    folders = sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py"))
    return ["hyper_parallel.backends", *(f"hyper_parallel.backends.{name}" for name in folders)]


def test_wheel_holds_every_file(wheel):
    expected = {"hyper_parallel/py.typed", "hyper_parallel/backends/py.typed"}
    for folder, name in (
        ("hyper_parallel", "hyper_parallel"),
        ("backends", "hyper_parallel/backends"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            expected.add(f"{name}/{path.relative_to(ROOT / folder).as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_installs(wheel, tmp_path):
    python = install(tmp_path, str(wheel))
    found = probe(python, "hyper_parallel", *backend_names())
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(tmp_path), name
    assert found["version"] == "0.1.0"
    assert not found["top_level_backends"]
    assert found["own_entry_points"] == []
    assert found["scripts"] == ["hyper_parallel.cli:main"]


def test_editable_installs(source, tmp_path):
    python = install(tmp_path, "--editable", str(source))
    found = probe(python, "hyper_parallel", *backend_names())
    for name, file in found["files"].items():
        folder = "backends" if "backends" in name else "hyper_parallel"
        assert Path(file).is_relative_to(source / folder), name
    assert not found["top_level_backends"]


def test_editable_sees_a_new_module(source, tmp_path):
    python = install(tmp_path, "--editable", str(source))
    new = source / "backends" / "new_one"
    new.mkdir()
    (new / "__init__.py").write_text("")
    found = probe(python, "hyper_parallel.backends.new_one")
    assert found["files"] == {"hyper_parallel.backends.new_one": os.fspath(new / "__init__.py")}
