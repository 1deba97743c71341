# SPDX-License-Identifier: Apache-2.0
"""Device names: generic code asks a backend what it can do, and never which one it is.

No string, identifier or comment of a generic room names a device, a vendor or its library, in a
name like is_cuda or CudaBackend either; a docstring may, as an example. What must is in ALLOWED,
with its reason. The tools, the command line
and the conformance suite are for people, who want to see the names.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = "cpu cuda npu nccl hccl gloo ascend nvidia cann rocm hip xpu mps tpu xla".split()
CAMEL = "|".join(word.capitalize() for word in WORDS)
NAME = re.compile(
    rf"(?<![a-z0-9])(?:{'|'.join(WORDS)})(?![a-z0-9])|(?-i:(?:{CAMEL})(?=[A-Z]))", re.IGNORECASE
)
FREE = ("tools", "conformance", "cli", "__main__")
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# tokenize gives the text of an f-string in parts from Python 3.12 on.
TEXTS = {tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}

# File -> what it may name, and why.
ALLOWED = {
    "runtime/registry.py": (
        r"cpu|cuda|npu|CpuBackend|CudaBackend|NpuBackend",
        "the one table of device types; backends named as text",
    ),
    "runtime/calls.py": (r"torch_npu", "a line of that package is not the user's line"),
    "rules/__init__.py": (r"npu", "the module of the next line"),
    "rules/npu.py": (r"npu_\w+", "rules are found by the names of ops, a vendor's too"),
    "dtensor/parameters.py": (r"npu_\w+", "the parameters of those ops"),
    "dtensor/declare.py": (r"cpu", "the method of a tensor: a copy that the host can read"),
    "dtensor/decisions.py": (r"cpu", "the same method, among those that read values"),
    "dtensor/local_forms.py": (r"_?npu_\w+", "one of those ops counts the heads of its tensor"),
}


def docstrings(tree: ast.AST) -> set[tuple[int, int]]:
    """Return where docstrings begin."""
    return {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None
    }


def named(path: Path, allowed: str | None) -> Iterator[str]:
    """Yield every token of a file that names a device and is not allowed to."""
    text = path.read_text()
    skip = docstrings(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in TEXTS or token.start in skip:
            continue
        rest = re.sub(rf"\b(?:{allowed})\b", "", token.string) if allowed else token.string
        if NAME.search(rest):
            yield f"{token.start[0]}: {token.string.splitlines()[0]}"


def device_names(root: Path, allowed: dict[str, tuple[str, str]]) -> list[str]:
    """Return every name of a device in the generic rooms, by file and line."""
    package = root / "hyper_parallel"
    found = []
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if inner.parts[0].removesuffix(".py") not in FREE:
            pattern = allowed.get(inner.as_posix(), (None, ""))[0]
            found += [f"{inner.as_posix()}:{one}" for one in named(path, pattern)]
    return found


def test_names_of_devices_stay_out_of_generic_rooms():
    problems = device_names(ROOT, ALLOWED)
    assert not problems, "\n".join(["", *problems])


def test_names_that_are_allowed_are_there():
    files = {line.partition(":")[0] for line in device_names(ROOT, {})}
    assert files == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "x = 'cuda'",
        "def f(d):\n    return f'{d} is npu:0'",
        "x = {'hccl': 1}",
        "y = x.is_cuda",
        "import torch_npu",
        "def npu_sum(): ...",
        "f(gloo=1)",
        "x = 1  # as NCCL does",
        "y = MyCudaThing()",
        "def on_cpu(): ...",
    ],
)
def test_names_refuses(tmp_path, text):
    (tmp_path / "hyper_parallel" / "runtime").mkdir(parents=True)
    (tmp_path / "hyper_parallel" / "runtime" / "a.py").write_text(text)
    assert len(device_names(tmp_path, {})) == 1


def test_names_accepts_docstrings_the_rooms_for_people_and_what_is_allowed(tmp_path):
    for name, text in {
        "core/a.py": '"""On cuda."""\nx = "barracuda"\ndef f():\n    """Use npu."""\n',
        "tools/a.py": "x = 'cuda'",
        "rules/a.py": "x = 'npu_sum'",
    }.items():
        path = tmp_path / "hyper_parallel" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert device_names(tmp_path, {"rules/a.py": (r"npu_\w+", "an op")}) == []
    assert device_names(tmp_path, {"rules/a.py": (r"npu", "not the op")}) != []
