# SPDX-License-Identifier: Apache-2.0
"""Sizes: 300 lines a file and 40 a function are aims; 500 and 60 are stops.

What must be over a stop is in size_allow.txt, with its reason. A function's docstring is not
counted: a longer contract is no reason to split code.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hyper_parallel

ROOT = Path(__file__).resolve().parents[2]
ALLOW = Path(__file__).with_name("size_allow.txt")
FOLDERS = ("hyper_parallel", "backends")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Limit(NamedTuple):
    """How many lines to aim at, and where to stop."""

    aim: int
    stop: int


FILE_LINES = Limit(aim=300, stop=500)
FUNCTION_LINES = Limit(aim=40, stop=60)


class Size(NamedTuple):
    """The lines of one file ("path") or one function ("path:Class.name")."""

    where: str
    lines: int
    limit: Limit


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function from its `def`, without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def functions(node: ast.AST, prefix: str) -> Iterator[Size]:
    """Yield the size of every function below a node, nested ones too."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (*FUNCTION, ast.ClassDef)):
            inner = f"{prefix}.{child.name}" if not prefix.endswith(":") else prefix + child.name
        if isinstance(child, FUNCTION):
            yield Size(inner, function_lines(child), FUNCTION_LINES)
        yield from functions(child, inner)


def sizes(root: Path) -> Iterator[Size]:
    """Yield the size of every file and function of the package and of the backends."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            yield Size(name, len(text.splitlines()), FILE_LINES)
            yield from functions(ast.parse(text), f"{name}:")


def allowed(text: str) -> dict[str, str]:
    """Read the allow-list: what may be over the stop, and why."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {name: reason for name, _, reason in (line.partition("  ") for line in lines)}


def size_problems(root: Path, allow: dict[str, str]) -> list[str]:
    """Return what is over the stop and not allowed, and what is allowed without need or reason."""
    over = {size.where: size for size in sizes(root) if size.lines > size.limit.stop}
    problems = [
        f"{size.where}: {size.lines} lines, stop at {size.limit.stop}"
        for where, size in over.items()
        if where not in allow
    ]
    for where, reason in allow.items():
        if where not in over:
            problems.append(f"{where}: is allowed to be over the stop, and is not")
        elif not reason.strip():
            problems.append(f"{where}: is allowed to be over the stop without a reason")
    return problems


def over_aim(root: Path) -> list[str]:
    """Return a line for everything over its aim that is not over the stop."""
    return [
        f"{size.where}: {size.lines} lines, aim at {size.limit.aim}"
        for size in sizes(root)
        if size.limit.aim < size.lines <= size.limit.stop
    ]


def test_sizes_stay_under_the_stop(size_report):
    size_report += over_aim(ROOT)
    problems = size_problems(ROOT, allowed(ALLOW.read_text()))
    assert not problems, "\n".join(["", *problems])


def test_public_names_stay_few():
    assert len(hyper_parallel.__all__) <= 40


def function_of(lines: int, *, docstring: int = 0) -> str:
    """Return a method whose body, with its `def`, has that many lines."""
    doc = '        """Do.\n' + "\n" * (docstring - 2) + '        """\n' if docstring else ""
    return f"class A:\n    def f(self):\n{doc}" + "        x = 1\n" * (lines - 1)


def test_sizes_refuses_what_is_over_the_stop(tmp_path):
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "a.py").write_text("x = 1\n" * 501)
    (tmp_path / "backends" / "b.py").write_text(function_of(61))
    wrong = ["backends/a.py: 501 lines, stop at 500", "backends/b.py:A.f: 61 lines, stop at 60"]
    assert size_problems(tmp_path, {}) == wrong
    reasons = {"backends/a.py": "a table", "backends/b.py:A.f": "one match statement"}
    assert size_problems(tmp_path, reasons) == []


def test_sizes_reports_what_is_over_the_aim(tmp_path):
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "a.py").write_text(function_of(41, docstring=30))
    (tmp_path / "backends" / "b.py").write_text(function_of(40, docstring=30))
    assert size_problems(tmp_path, {}) == []
    assert over_aim(tmp_path) == ["backends/a.py:A.f: 41 lines, aim at 40"]


def test_sizes_refuses_an_idle_or_unexplained_allowance(tmp_path):
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "a.py").write_text("x = 1\n" * 501)
    idle, unexplained = size_problems(tmp_path, allowed("b.py  why\nbackends/a.py\n"))
    assert idle == "b.py: is allowed to be over the stop, and is not"
    assert "without a reason" in unexplained


BACKEND_LINES = re.compile(r"In lines: (.*?)\n\n", re.DOTALL)


def test_the_document_says_how_long_each_backend_is():
    (said,) = BACKEND_LINES.findall((ROOT / "docs" / "architecture.md").read_text())
    numbers = {name: int(n.replace(",", "")) for name, n in re.findall(r"`(\w+)` ([\d,]+)", said)}
    counted = {
        folder.name: sum(len(path.read_text().splitlines()) for path in folder.glob("*.py"))
        for folder in (ROOT / "backends").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    assert numbers.keys() == counted.keys()
    near = {name: abs(counted[name] - n) <= max(15, n // 10) for name, n in numbers.items()}
    assert all(near.values()), f"docs/architecture.md says {numbers}, but there are {counted}"
    assert f"{len((ROOT / 'examples' / 'hub_backend.py').read_text().splitlines())}." in said
