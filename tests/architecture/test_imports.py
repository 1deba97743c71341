# SPDX-License-Identifier: Apache-2.0
"""Import direction: a room imports only lower rooms, nobody imports a backend, no circles.

Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, and
import_module("text").
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hyper_parallel"
BACKENDS = f"{PACKAGE}.backends"

# Lowest first; rooms on one line do not know each other.
ROOMS = (
    {"errors"},
    {"core"},
    {"rules", "runtime"},
    {"dtensor"},
    {"parallel"},
    {"fsdp", "checkpoint"},
    {"hf"},
    {"conformance", "tools"},
    {"cli"},
    {"__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FRAMEWORK_FREE = {"errors", "core", "rules", "runtime"}
# These use the package as a user does, through its public names.
MAY_USE_PUBLIC_NAMES = set.union(*ROOMS[LEVEL["conformance"] :])
BACKEND_MAY_IMPORT = {"errors", "core", "runtime"}
# The simulated backend knows NumPy and no torch; every other one is a torch backend.
BACKEND_FRAMEWORKS = {"numpy": {"numpy"}}
TORCH = {"torch", "torch_npu"}


class Import(NamedTuple):
    """One import: which module, on which line, wants which other module."""

    importer: str
    where: str
    target: str


def modules(root: Path) -> dict[str, Path]:
    """Map every module under its installed name, packages included, to its file or folder."""
    found: dict[str, Path] = {}
    for folder, name in ((root / PACKAGE, PACKAGE), (root / "backends", BACKENDS)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parents = [".".join((name, *parts[:depth])) for depth in range(len(parts))]
            for parent in parents:
                found.setdefault(parent, path.parent)
            found[parents[-1] if parts[-1] == "__init__" else ".".join((name, *parts))] = path
    return {name: path for name, path in found.items() if path.is_file()}


def targets(node: ast.AST, *, package: str, known: set[str]) -> Iterator[str]:
    """Yield the absolute names of the modules that one node imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join((*parts[: len(parts) - node.level + 1], *filter(None, [node.module])))
        for alias in node.names:
            name = f"{base}.{alias.name}"
            is_module = any(k == name or k.startswith(f"{name}.") for k in known)
            yield name if is_module else base
    elif isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func).rpartition(".")[2]
        text = node.args[0]
        is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
        if called in {"import_module", "__import__"} and is_text:
            yield text.value


def imports(root: Path) -> list[Import]:
    """Return every import of every module of the package and of the backends."""
    found = []
    files = modules(root)
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in targets(node, package=package, known=set(files)):
                where = f"{path.relative_to(root)}:{node.lineno}"
                found.append(Import(name, where, target))
    return found


def room_of(module: str) -> str:
    """Return the room of a module of the package; "" is the package itself."""
    return module.removeprefix(PACKAGE).lstrip(".").partition(".")[0]


def is_external(target: str) -> bool:
    """Say whether a target is neither ours nor the standard library's."""
    top = target.partition(".")[0]
    return top != PACKAGE and top not in sys.stdlib_module_names


def backend_problem(item: Import) -> str | None:
    """Say what is wrong with an import by a backend, if anything is."""
    backend = item.importer.removeprefix(BACKENDS).lstrip(".").partition(".")[0]
    if is_external(item.target):
        allowed = BACKEND_FRAMEWORKS.get(backend, TORCH)
        top = item.target.partition(".")[0]
        return None if backend and top in allowed else f"a backend imports {top}"
    if item.target.startswith(BACKENDS):
        other = item.target.removeprefix(BACKENDS).lstrip(".").partition(".")[0]
        shared = other.startswith("_") and backend not in BACKEND_FRAMEWORKS
        return None if other == backend or shared else f"backend {backend} imports backend {other}"
    is_ours = item.target.partition(".")[0] == PACKAGE
    if is_ours and room_of(item.target) not in BACKEND_MAY_IMPORT:
        return f"a backend imports {item.target}"
    return None


def room_problem(item: Import) -> str | None:
    """Say what is wrong with an import by a room, if anything is."""
    room, target = room_of(item.importer), room_of(item.target)
    if room not in LEVEL:
        return f"{room} is not in the table of rooms"
    if is_external(item.target):
        top = item.target.partition(".")[0]
        return f"{room} imports {top}" if room in FRAMEWORK_FREE else None
    if item.target.partition(".")[0] != PACKAGE or room == target:
        return None
    if not target:
        public = room in MAY_USE_PUBLIC_NAMES
        return None if public else f"{room} imports public names; import the module they live in"
    if target == "backends":
        return f"{room} imports a backend; backends are loaded by name"
    if LEVEL.get(target, len(ROOMS)) >= LEVEL[room]:
        return f"{room} imports {target}, which is not below it"
    return None


def direction_problems(root: Path) -> list[str]:
    """Return every import that does not go down; the package's own lazy __init__ is exempt."""
    problems = []
    for item in imports(root):
        if item.importer == PACKAGE:
            continue
        is_backend = f"{item.importer}.".startswith(f"{BACKENDS}.")
        problem = backend_problem(item) if is_backend else room_problem(item)
        if problem:
            problems.append(f"{item.where}: {problem}")
    return problems


def cycles(root: Path) -> list[str]:
    """Return each import circle once, as "a -> b -> a"."""
    graph: dict[str, set[str]] = {name: set() for name in modules(root) if name != PACKAGE}
    for item in imports(root):
        if item.importer in graph and item.target in graph and item.importer != item.target:
            graph[item.importer].add(item.target)
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def second_copies(root: Path) -> list[str]:
    """Return every import of the folder backends/ as itself, which would load it a second time."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if any(part.startswith(".") or part in {"build", "typings"} for part in inside.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            # A relative import cannot leave its package: anchor it at a name that is not ours.
            for target in targets(node, package="_._._._._", known=set()):
                if target.partition(".")[0] == "backends":
                    found.append(f"{inside}:{node.lineno}")
    return found


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a small tree of sources; every folder becomes a package."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, *path.parent.parents):
            if folder == root:
                break
            (folder / "__init__.py").touch()
        path.write_text(text)
    return root


def test_imports_go_down():
    problems = direction_problems(ROOT)
    assert not problems, "\n".join(["", *problems])


def test_imports_have_no_cycle():
    problems = cycles(ROOT)
    assert not problems, "\n".join(["", *problems])


def test_backends_is_never_imported_as_itself():
    problems = second_copies(ROOT)
    assert not problems, "\n".join(["", *problems])


WRONG = {
    "upward": ("core/a.py", "from ..dtensor import x", "core imports dtensor"),
    "sideways": ("rules/a.py", "import hyper_parallel.runtime.b", "rules imports runtime"),
    "lazy": ("runtime/a.py", "def f():\n    from ..parallel import x", "runtime imports parallel"),
    "typing": ("core/a.py", "if TYPE_CHECKING:\n    from ..hf import x", "core imports hf"),
    "text": ("hf/a.py", "import_module('hyper_parallel.tools')", "hf imports tools"),
    "module": ("errors.py", "from hyper_parallel import core", "errors imports core"),
    "public": ("dtensor/a.py", "from hyper_parallel import Shard", "public names"),
    "framework": ("rules/a.py", "def f():\n    import torch", "rules imports torch"),
    "backend": ("parallel/a.py", "import hyper_parallel.backends.cpu", "imports a backend"),
    "unknown": ("other/a.py", "import os", "other is not in the table"),
}


def test_imports_refuses_each_wrong_import(tmp_path):
    for case, (name, text, problem) in WRONG.items():
        files = {f"{PACKAGE}/core/b.py": "", f"{PACKAGE}/{name}": text}
        (found,) = direction_problems(plant(tmp_path / case, files))
        assert problem in found


WRONG_BACKEND = {
    "room": ("cpu/a.py", "from hyper_parallel.rules import x", "imports hyper_parallel.rules"),
    "other": ("cpu/a.py", "from ..cuda import x", "backend cpu imports backend cuda"),
    "torch": ("numpy/a.py", "import torch", "a backend imports torch"),
    "shared": ("numpy/a.py", "from .._torch import x", "backend numpy imports backend _torch"),
    "foreign": ("cuda/a.py", "import triton", "a backend imports triton"),
}


def test_imports_refuses_each_wrong_backend(tmp_path):
    for case, (name, text, problem) in WRONG_BACKEND.items():
        (found,) = direction_problems(plant(tmp_path / case, {f"backends/{name}": text}))
        assert problem in found


def test_imports_accepts_what_is_right(tmp_path):
    files = {
        f"{PACKAGE}/errors.py": "import os",
        f"{PACKAGE}/core/a.py": "from ..errors import x\nfrom . import b\nimport dataclasses",
        f"{PACKAGE}/core/b.py": "",
        f"{PACKAGE}/fsdp.py": "import torch\nfrom .parallel import x\nfrom .core.b import y",
        f"{PACKAGE}/tools/a.py": "import hyper_parallel as hp",
        "backends/cpu/a.py": "import torch\nfrom .._torch import x\nfrom ...core import a",
        "backends/numpy/a.py": "import numpy as np\nfrom hyper_parallel.runtime import b",
    }
    assert direction_problems(plant(tmp_path, files)) == []
    assert cycles(tmp_path) == []


def test_cycles_finds_a_circle(tmp_path):
    files = {
        f"{PACKAGE}/core/a.py": "def f():\n    from . import b",
        f"{PACKAGE}/core/b.py": "from hyper_parallel.core.c import x",
        f"{PACKAGE}/core/c.py": "from .a import y",
    }
    (found,) = cycles(plant(tmp_path, files))
    assert found.count("->") == 3


def test_second_copies_finds_the_folder_imported_as_itself(tmp_path):
    files = {"tests/a.py": "from backends.cpu import x", "tests/b.py": "import backends"}
    assert len(second_copies(plant(tmp_path, files))) == 2
