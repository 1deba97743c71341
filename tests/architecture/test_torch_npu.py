# SPDX-License-Identifier: Apache-2.0
"""docs/torch_npu.md says all that we take from torch_npu, and a wheel of it has all of that.

The comparison needs a wheel: `make npu-contract` downloads one and names it in NPU_WHEEL. Its files
are read as text; nothing of it is installed or run.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "torch_npu.md"
SIMULATED = ROOT / "tests" / "support" / "npu" / "torch_npu"
WHEEL = os.environ.get("NPU_WHEEL")
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


class Row(NamedTuple):
    """One thing that a file of the wheel must have."""

    file: str
    text: str


def rows() -> list[Row]:
    """Read the table."""
    return [Row(*match) for match in ROW.findall(TABLE.read_text())]


def signature(node: ast.FunctionDef) -> str:
    """Write a function's name and parameters, without types."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"def {node.name}({ast.unparse(node.args)})"


def has(data: bytes, text: str) -> bool:
    """Tell whether a file's contents have a row's text, or its function."""
    if not text.startswith("def "):
        return text.encode() in data
    body = ast.parse(data).body
    return text in [signature(node) for node in body if isinstance(node, ast.FunctionDef)]


def lacking(wheel: zipfile.ZipFile, wanted: list[Row]) -> list[Row]:
    """Return the rows that a wheel does not have."""
    contents: dict[str, bytes] = {}
    missing = []
    for row in wanted:
        if row.file not in contents:
            found = fnmatch.filter(wheel.namelist(), row.file)
            contents[row.file] = wheel.read(found[0]) if found else b""
        if not has(contents[row.file], row.text):
            missing.append(row)
    return missing


@pytest.mark.skipif(WHEEL is None, reason="no wheel is named in NPU_WHEEL: make npu-contract")
def test_the_wheel_has_every_name_signature_and_text():
    with zipfile.ZipFile(str(WHEEL)) as wheel:
        assert lacking(wheel, rows()) == []


@pytest.mark.parametrize(
    ("text", "row", "found"),
    [
        ("def f(a: int = 1, *, b: str): ...", "def f(a=1, *, b)", True),
        ("def f(a: int = 2, *, b: str): ...", "def f(a=1, *, b)", False),
        ("class C:\n    def f(self): ...", "def f(self)", False),
        ("x = 'Tensors must'", "Tensors must", True),
        ("x = 'Tensors should'", "Tensors must", False),
    ],
)
def test_a_changed_wheel_is_found(tmp_path, text, row, found):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("torch_npu-9.dist-info/a.py", text)
    with zipfile.ZipFile(path) as wheel:
        wanted = [Row("torch_npu-*.dist-info/a.py", row)]
        assert lacking(wheel, wanted) == ([] if found else wanted)
        assert lacking(wheel, [Row("b.py", row)])


def names_of_torch_npu(path: Path) -> set[str]:
    """Return every name that a file of the backend reads from torch_npu or its device module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            source = ast.unparse(node.value)
            if "torch_npu" in source or "get_device_module" in source or source == "module":
                found.add(node.attr)
    return found - {"_torch_npu"}


def used() -> set[str]:
    """Return every such name of the backends."""
    paths = [
        *(ROOT / "backends" / "npu").glob("*.py"),
        *(ROOT / "backends" / "_torch").glob("*.py"),
    ]
    return set().union(*map(names_of_torch_npu, paths))


def test_every_name_that_the_backend_uses_is_in_the_table_and_simulated():
    table = TABLE.read_text()
    simulated = "\n".join(path.read_text() for path in SIMULATED.glob("*.py"))
    assert used() >= {"get_npu_format", "npu_format_cast", "is_available", "set_device"}
    for name in used():
        assert re.search(rf"`[^`|]*\b{name}\b[^`|]*`", table), f"{name} is not in {TABLE.name}"
        assert re.search(rf"\b{name}\b", simulated), f"{name} is not simulated"


def test_the_private_formats_are_those_of_the_table():
    source = (ROOT / "backends" / "npu" / "formats.py").read_text()
    numbers = set(map(int, re.findall(r"\d+", re.search(r"_PRIVATE = (.*)", source)[1])))
    listed = {int(n) for n in re.findall(r"`[A-Z0-9_]+ = (\d+)` \| private", TABLE.read_text())}
    assert listed | {51, 52, 53} == numbers


def test_the_simulated_refusals_are_in_the_words_of_the_table():
    said = [
        row.text for row in rows() if "What HCCL refuses" in TABLE.read_text().split(row.text)[0]
    ]
    simulated = " ".join((SIMULATED / "_hccl.py").read_text().split())
    gather = {"ProcessGroupHCCL does not support gather", "ProcessGroupHCCL does not support recv"}
    assert len(said) > 10
    for text in set(said) - gather:
        assert text in simulated, text
