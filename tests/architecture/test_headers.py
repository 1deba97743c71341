# SPDX-License-Identifier: Apache-2.0
"""Headers: every Python file names its license on the first line, says what it is, and is ASCII."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hyper_parallel", "backends", "tests", "examples", "benchmarks")
SPDX = "# SPDX-License-Identifier: Apache-2.0"


def header_problems(root: Path) -> list[str]:
    """Return what is wrong with the head or the alphabet of any file."""
    problems = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name, data = path.relative_to(root).as_posix(), path.read_bytes()
            if data.partition(b"\n")[0] != SPDX.encode():
                problems.append(f"{name}: the first line must be {SPDX}")
            for number, line in enumerate(data.splitlines(), start=1):
                if not line.isascii():
                    problems.append(f"{name}:{number}: not ASCII")
            if ast.get_docstring(ast.parse(data)) is None:
                problems.append(f"{name}: no module docstring")
    return problems


def test_headers_of_every_file():
    problems = header_problems(ROOT)
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"""One thing."""\n', "the first line must be"),
        (f'{SPDX}\n"""One thing."""\nx = "\u00e9"\n', "a.py:3: not ASCII"),
        (f"{SPDX}\nx = 1\n", "no module docstring"),
    ],
)
def test_headers_refuses(tmp_path, text, problem):
    (tmp_path / "hyper_parallel").mkdir()
    (tmp_path / "hyper_parallel" / "a.py").write_text(text, encoding="utf-8")
    (found,) = header_problems(tmp_path)
    assert problem in found


def test_headers_accepts(tmp_path):
    (tmp_path / "hyper_parallel").mkdir()
    (tmp_path / "hyper_parallel" / "a.py").write_text(f'{SPDX}\n"""One thing."""\n')
    assert header_problems(tmp_path) == []
