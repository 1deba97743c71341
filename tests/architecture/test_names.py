# SPDX-License-Identifier: Apache-2.0
"""Device names: generic code asks a backend what it can do, and never which one it is.

The registry (runtime) maps names to backends; the tools and the conformance suite print them.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"(?<![A-Za-z0-9_])(cuda|npu|nccl|hccl|gloo)(?![A-Za-z0-9_])")
EXEMPT = ("runtime", "tools", "conformance")
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes that are docstrings, not values."""
    return {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None
    }


def device_names(root: Path) -> list[str]:
    """Return every string of the generic rooms that names a device or a vendor's library."""
    package = root / "hyper_parallel"
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0].removesuffix(".py") in EXEMPT:
            continue
        tree = ast.parse(path.read_text())
        skip = docstrings(tree)
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and node not in skip and NAME.search(node.value):
                found.append(f"{path.relative_to(root).as_posix()}:{node.lineno}: {node.value!r}")
    return found


def test_names_of_devices_stay_out_of_generic_rooms():
    problems = device_names(ROOT)
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize(
    "text", ["x = 'cuda'", "def f(d):\n    return f'{d} is npu:0'", "x = {'hccl': 1}"]
)
def test_names_refuses(tmp_path, text):
    (tmp_path / "hyper_parallel" / "dtensor").mkdir(parents=True)
    (tmp_path / "hyper_parallel" / "dtensor" / "a.py").write_text(text)
    assert len(device_names(tmp_path)) == 1


def test_names_accepts_docstrings_and_the_exempt_rooms(tmp_path):
    for name, text in {
        "core/a.py": '"""On cuda."""\nx = "barracuda"',
        "runtime/a.py": "x = 'cuda'",
    }.items():
        path = tmp_path / "hyper_parallel" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert device_names(tmp_path) == []
