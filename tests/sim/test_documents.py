# SPDX-License-Identifier: Apache-2.0
"""The documents are true: their examples run, and what they name exists.

A Python block says what it is behind the language: `run` is run here as it stands, `torchrun` needs
processes, so it is compiled and its imports from the package are looked up. In a diff the added
imports are looked up.
"""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hyper_parallel import rules

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
NOTE = re.compile(r"\[(Note: [a-z ]+)\]")
PATH = re.compile(r"\.?[\w.-]+(/[\w.-]+)*/|[\w./-]+\.(py|md|txt|toml)|\.ci/run")
DOTTED = re.compile(r"hyper_parallel(\.\w+)+")
# Environments, which make makes, and the files in a wheel.
ELSEWHERE = (".venv", "torch_npu/")
MAKE = re.compile(r"\bmake ([a-z-]+)\b")


class Block(NamedTuple):
    """One fenced block: its language with what follows it, and its text at its place."""

    where: str
    kind: str
    text: str


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        # Blank lines in front, so that a traceback shows the line of the document.
        yield Block(f"{name(path)}:{line}", found[1].strip(), "\n" * line + found[2])


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def import_problems(block: Block) -> list[str]:
    """Return what a block imports from the package that does not exist."""
    problems = []
    for node in ast.walk(ast.parse(block.text)):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("hyper_parallel"):
            continue
        module = importlib.import_module(node.module)
        missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
        problems += [f"{block.where}: {node.module} has no {name}" for name in missing]
    return problems


def after(diff: str) -> str:
    """Return what a diff leaves: its added and its unchanged lines."""
    return "".join(line[1:] for line in diff.splitlines(True) if not line.startswith("-"))


def block_problems(path: Path) -> list[str]:
    """Return what is wrong with the blocks of a document, but for what running them shows."""
    problems = []
    for block in blocks(path):
        language = block.kind.partition(" ")[0]
        if language == "python" and block.kind not in ("python run", "python torchrun"):
            problems.append(f"{block.where}: a python block must say run or torchrun")
        elif language == "python":
            problems += import_problems(block)
        elif language == "diff":
            problems += import_problems(block._replace(text=after(block.text)))
    return problems


def resolves(dotted: str) -> bool:
    """Say whether a dotted name of the package is a module or something in one."""
    module, rest = dotted, []
    while module:
        try:
            value = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def name_problems(path: Path) -> list[str]:
    """Return every link, path, name, note and make target of a document that does not exist."""
    text, problems = prose(path), []
    for target in LINK.findall(text):
        file, _, heading = target.partition("#")
        linked = path.parent / file if file else path
        if "://" in target or not linked.exists():
            problems.append(f"link {target}")
        elif heading and heading not in headings(linked):
            problems.append(f"heading {target}")
    for code in CODE.findall(text):
        found = [path.parent / code, ROOT / code]
        if PATH.fullmatch(code) and not any(place.exists() for place in found):
            problems += [] if code.startswith(ELSEWHERE) else [f"path {code}"]
        if DOTTED.fullmatch(code) and not PATH.fullmatch(code) and not resolves(code):
            problems.append(f"name {code}")
    problems += [f"{note} in the code" for note in NOTE.findall(text) if note not in notes()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    bash = "".join(block.text for block in blocks(path) if block.kind == "bash")
    commands = "\n".join([*CODE.findall(text), bash])
    problems += [f"make {word}" for word in MAKE.findall(commands) if word not in targets]
    return [f"{name(path)}: there is no {problem}" for problem in problems]


def headings(path: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def notes() -> set[str]:
    """Return the names of the notes in the code."""
    sources = [*ROOT.glob("hyper_parallel/**/*.py"), *ROOT.glob("backends/**/*.py")]
    return {found for path in sources for found in NOTE.findall(path.read_text())}


RUN = [block for path in documents() for block in blocks(path) if block.kind == "python run"]


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_documents_run(block, monkeypatch):
    # What an example registers ends with it.
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    exec(compile(block.text, block.where.partition(":")[0], "exec"), {"__name__": "example"})


@pytest.mark.parametrize("path", documents(), ids=name)
def test_documents_name_what_exists(path):
    problems = block_problems(path) + name_problems(path)
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize("path", documents(), ids=name)
def test_documents_are_ascii(path):
    text = path.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if not line.isascii()] == []


def test_documents_have_a_row_for_each_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "hyper_parallel").glob("*/__init__.py")]
    missing = [room for room in rooms if f"| `hyper_parallel/{room}/` |" not in text]
    assert not missing, "add a row to the table of rooms in docs/architecture.md"


WRONG = {
    "unmarked": ("```python\nx = 1\n```\n", "a python block must say run or torchrun"),
    "import": ("```python torchrun\nfrom hyper_parallel import Nothing\n```\n", "has no Nothing"),
    "diff": ("```diff\n-from torch import x\n+from hyper_parallel import No\n```\n", "has no No"),
    "link": ("See [a](missing.md).\n", "link missing.md"),
    "remote": ("See [a](https://example.org/a).\n", "link https://example.org/a"),
    "heading": ("# One\n\nSee [a](#two).\n", "heading #two"),
    "path": ("In `hyper_parallel/nowhere.py`.\n", "path hyper_parallel/nowhere.py"),
    "folder": ("In `tests/nowhere/`.\n", "path tests/nowhere/"),
    "name": ("Call `hyper_parallel.core.nothing`.\n", "name hyper_parallel.core.nothing"),
    "note": ("See [Note: of nothing].\n", "Note: of nothing in the code"),
    "target": ("```bash\nmake nothing\n```\n", "make nothing"),
    "inline target": ("Run `make nothing X=1`.\n", "make nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_documents_refuses(tmp_path, case):
    text, problem = WRONG[case]
    path = tmp_path / "a.md"
    path.write_text(text)
    (found,) = block_problems(path) + name_problems(path)
    assert problem in found


def test_documents_accepts_what_is_right(tmp_path):
    path = tmp_path / "a.md"
    path.write_text(
        "# One thing\n\nSee [it](#one-thing), `hyper_parallel/core/plan.py`, `tests/sim/`,\n"
        "`hyper_parallel.core.plan` and `make test`.\n\n"
        "```python torchrun\nfrom hyper_parallel import Shard\n```\n\n"
        "```diff\n-from torch import gone\n+from hyper_parallel import (\n     Shard,\n+)\n```\n"
    )
    assert block_problems(path) + name_problems(path) == []


def test_documents_run_shows_the_line_of_the_document(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("# One\n\n```python run\nx = 1\nassert x == 2\n```\n")
    (block,) = blocks(path)
    with pytest.raises(AssertionError) as caught:
        exec(compile(block.text, "a.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 5
