# SPDX-License-Identifier: Apache-2.0
"""Torch's internals: those we use are in docs/torch_internals.md, each with its reason.

An internal is a dotted name with an underscored part that a module imports from torch or reaches by
attributes from such an import. A row of the table answers for the names below it: `torch._dynamo`
answers for `torch._dynamo.disable`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path("docs") / "torch_internals.md"
FOLDERS = ("hyper_parallel", "backends")


def is_internal(part: str) -> bool:
    """Say whether one part of a dotted name is an internal's."""
    return part.startswith("_") and not part.endswith("__")


def bindings(tree: ast.AST) -> dict[str, str]:
    """Map each local name to what it imports from torch."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: target for name, target in bound.items() if target.split(".")[0] == "torch"}


def chain(node: ast.AST) -> list[str]:
    """Return the parts of `a.b.c`, or nothing for what is not a plain chain."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        parts = chain(node.value)
        return [*parts, node.attr] if parts else []
    return []


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported, and of what is reached from torch."""
    bound = bindings(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            parts = chain(node)
            if parts and parts[0] in bound:
                yield node.lineno, ".".join((bound[parts[0]], *parts[1:]))


def answers(name: str) -> set[str]:
    """Return the rows that answer for a name: itself, and what leads to its last internal part."""
    parts = name.split(".")
    last = max(index for index, part in enumerate(parts) if is_internal(part))
    return {".".join(parts[:end]) for end in range(last + 1, len(parts) + 1)}


def unexplained(root: Path, table: str) -> list[str]:
    """Return every use of an internal of torch that no row of the table answers for."""
    rows = set(re.findall(r"^\|\s*`([^`]+)`", table, flags=re.MULTILINE))
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for line, name in torch_names(ast.parse(path.read_text())):
                parts = name.split(".")
                if (
                    parts[0] == "torch"
                    and any(map(is_internal, parts))
                    and not answers(name) & rows
                ):
                    found.append(f"{path.relative_to(root).as_posix()}:{line}: {name}")
    return found


def test_torch_internals_are_explained():
    problems = unexplained(ROOT, (ROOT / TABLE).read_text())
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import _x", "torch._C._x"),
        ("import torch.distributed as dist\ndist._coalescing()", "torch.distributed._coalescing"),
        ("from torch import Tensor\nTensor._make_subclass(x)", "torch.Tensor._make_subclass"),
        ("from torch.utils import _pytree as p\np.tree_map()", "torch.utils._pytree"),
    ],
)
def test_torch_internals_refuses(tmp_path, text, name):
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "a.py").write_text(text)
    found = unexplained(tmp_path, "| `torch` | a row that is too wide |")
    assert found
    assert all(name in line for line in found)
    assert unexplained(tmp_path, f"| `{name}` | why |") == []


def test_torch_internals_accepts_public_names(tmp_path):
    (tmp_path / "backends").mkdir()
    text = "import torch\nfrom . import _x\ntorch.__version__\ntorch.add(self._y, _x._z)"
    (tmp_path / "backends" / "a.py").write_text(text)
    assert unexplained(tmp_path, "") == []
