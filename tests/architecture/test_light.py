# SPDX-License-Identifier: Apache-2.0
"""Weight: importing the package loads no framework; its lower half works where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("numpy", "torch", "torch_npu")
FRAMEWORK_FREE = ("errors", "core", "rules", "runtime")

BLOCK = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMEWORKS!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
"""

REPORT = f"""
import sys
print(*sorted(set(sys.modules) & set({FRAMEWORKS!r})))
"""


def run(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees the tree at root first."""
    # An editable install would answer for what the tree lacks.
    only_here = "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f.__module__]"
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{only_here}\n{code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


def frameworks_loaded(root: Path) -> list[str]:
    """Return the frameworks that importing the package loads."""
    done = run(root, f"import hyper_parallel\n{REPORT}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def import_error(root: Path, room: str) -> str:
    """Import every module of a room with the frameworks blocked; return what went wrong, or ""."""
    folder = root / "hyper_parallel" / room
    names = [f"hyper_parallel.{room}"]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] != "__init__":
            names.append(".".join((names[0], *parts)))
    # A folder without __init__.py would import as an empty namespace.
    real = f"if sys.modules[{names[0]!r}].__file__ is None: sys.exit('no __init__.py')\n"
    done = run(root, BLOCK + "".join(f"import {name}\n" for name in names) + real)
    return done.stderr if done.returncode else ""


def test_light_package_loads_no_framework():
    problems = frameworks_loaded(ROOT)
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize("room", FRAMEWORK_FREE)
def test_light_room_needs_no_framework(room):
    assert import_error(ROOT, room) == ""


def test_light_sees_a_framework_loaded_at_import(tmp_path):
    (tmp_path / "hyper_parallel").mkdir()
    (tmp_path / "hyper_parallel" / "__init__.py").write_text("import numpy")
    assert frameworks_loaded(tmp_path) == ["numpy"]


def test_light_sees_a_framework_needed_by_a_room(tmp_path):
    room = tmp_path / "hyper_parallel" / "core"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").touch()
    (room / "__init__.py").touch()
    assert import_error(tmp_path, "core") == ""
    (room / "mesh.py").write_text("import torch.distributed")
    assert "blocked: torch" in import_error(tmp_path, "core")


def test_light_sees_a_missing_room(tmp_path):
    (tmp_path / "hyper_parallel").mkdir()
    (tmp_path / "hyper_parallel" / "__init__.py").touch()
    assert "No module named" in import_error(tmp_path, "rules")
    (tmp_path / "hyper_parallel" / "rules").mkdir()
    assert "no __init__.py" in import_error(tmp_path, "rules")
