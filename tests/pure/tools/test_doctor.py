# SPDX-License-Identifier: Apache-2.0
"""The doctor where torch is not installed, and how it tells what it found."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from hyper_parallel import cli
from hyper_parallel.conformance.worlds import WORLDS
from hyper_parallel.tools import doctor

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
from hyper_parallel.cli import main
sys.exit(main({arguments!r}))
"""


def run(*arguments: str, without: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the command line with some packages missing."""
    code = BLOCK.format(names=without, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_command_line_has_a_version():
    done = run("--version", without=("torch", "numpy"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == importlib.metadata.version("hyper-parallel")


def test_the_doctor_works_without_torch_and_numpy():
    done = run("doctor", "--json", without=("torch", "torch_npu", "numpy"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    backends = {one["name"]: one for one in found["backends"]}
    assert {"cpu", "cuda", "npu"} <= set(backends)
    for name in ("cpu", "cuda", "npu"):
        assert not backends[name]["available"]
        assert backends[name]["reason"] == "No module named 'torch'"
        assert backends[name]["fix"] == "install torch (pip install torch)"
    assert found["bandwidth"] == []


def test_the_doctor_prints_plain_text_without_rich():
    done = run("doctor", "--backend", "cpu", without=("torch", "numpy", "rich"))
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["cpu", "unavailable:", "No", "module", "named", "'torch'"] in [ln[:6] for ln in lines]
    assert done.stdout.endswith("PROBLEM backend 'cpu' cannot be used here\n")


def test_the_numpy_backend_conforms_without_torch():
    arguments = ("doctor", "--backend", "numpy", "--conformance", "--ranks", "4", "--json")
    done = run(*arguments, without=("torch", "torch_npu"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    results = found["conformance"][0]["results"]
    assert {one["status"] for one in results if one["group"].startswith("redist")} == {"pass"}
    assert {one["detail"] for one in results if not one["status"]} == {
        "one process is all ranks: there are no collectives"
    }
    assert found["bandwidth"] == [{"backend": "numpy", "ranks": None, "rows": []}]


def test_every_backend_that_cannot_be_loaded_says_why_and_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "broken_one.py").write_text("raise KeyError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    targets = {"broken": "broken_one:Backend", "lost": "no_such_package.sub:Backend"}
    monkeypatch.setattr(doctor, "available_backends", lambda: targets)
    broken, lost = doctor.examine()["backends"]
    assert broken["reason"] == "KeyError: 'no driver'"
    assert broken["fix"] == "reinstall the package that has broken_one:Backend"
    assert lost["reason"] == "No module named 'no_such_package'"
    assert lost["fix"] == "install no_such_package (pip install no_such_package)"


def test_an_available_backend_gives_its_devices(monkeypatch):
    class Backend:
        def unavailable(self):
            return None

        def about(self):
            return {"devices": ["abacus", "slide rule"], "libraries": {"beads": "7"}}

    monkeypatch.setattr(doctor, "available_backends", lambda: {"wood": "wood:Backend"})
    monkeypatch.setattr(doctor, "load_backend", lambda target: Backend())
    (found,) = doctor.examine()["backends"]
    assert found["available"]
    assert found["devices"] == ["abacus", "slide rule"]
    assert list(cli._backends({"backends": [found]})) == [
        ("wood", "available (beads 7)", "abacus; slide rule", "")
    ]


def test_variables_are_as_before_after_the_block(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(ZeroDivisionError), doctor.environment(KEPT="2", NEW="3"):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "3")
        raise ZeroDivisionError
    assert os.environ["KEPT"] == "1"
    assert "NEW" not in os.environ


def test_the_tables_print_text_that_looks_like_markup(capsys):
    cli.show_table("Title", [("name", "number"), ("all_reduce[sum]", "1.5")])
    assert "all_reduce[sum]" in capsys.readouterr().out


def test_the_worlds_are_those_of_the_suite():
    options = cli._parser().parse_args(["doctor", "--world", WORLDS[0]])
    assert options.world == WORLDS[0]
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["doctor", "--world", "moon"])
