# SPDX-License-Identifier: Apache-2.0
"""explain_redistribute without a framework: fields, text, pictures, and what it refuses."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from hyper_parallel import (
    HyperParallelError,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    explain_redistribute,
    plan,
)
from hyper_parallel.core import AbstractMesh, Layout, LinkModel, StridedShard

GRID = AbstractMesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
LINE = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()


def explained(mesh, src, dst, shape, **how):
    return explain_redistribute(Layout(mesh, src, shape), Layout(mesh, dst, shape), **how)


def test_fields_and_the_text_of_the_plan():
    model = LinkModel(name="mine", launch=1.0)
    found = explained(GRID, (S0, S1), (R, S0), (4096, 512), itemsize=2, model=model)
    steps = plan(found.src, found.dst, itemsize=2, model=model)
    assert [one.step for one in found.steps] == list(steps)
    assert str(found) == str(steps)
    assert "'mine': 1e+06 us a launch" in str(found)
    (step,) = found.steps
    assert (step.group, step.num_ranks) == ("dp+tp: 8 ranks", 8)
    assert found.received == step.received == found.needed == 4096 * 512 * 2 // 4


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "matplotlib"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from hyper_parallel import HyperParallelError, Layout, Replicate, Shard, explain_redistribute
from hyper_parallel import visualize_sharding
from hyper_parallel.core import AbstractMesh
mesh = AbstractMesh("cpu", (2,))
a, b = (Layout(mesh, (p,), (4,)) for p in (Shard(0), Replicate()))
print(explain_redistribute(a, b).received)
visualize_sharding(a)
try:
    explain_redistribute(a, b).save("x.png")
except HyperParallelError as error:
    print(error)
"""


def test_nothing_but_the_core_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "8",
        "Layout([4], S(0)@axis0)",
        "  0:2     2:4",
        "  rank 0  rank 1",
        "Explanation.save: matplotlib must be installed. Install it, as with pip install"
        " 'hyper-parallel[plot]' (blocked: matplotlib).",
    ], done.stderr


class NotALayout:
    pass


@pytest.mark.parametrize("name", ["src", "dst"])
def test_refuses_what_is_no_layout(name):
    ends = {"src": Layout(LINE, (R,), (4,)), "dst": Layout(LINE, (R,), (4,)), name: NotALayout()}
    with pytest.raises(
        LayoutError,
        match=f"explain_redistribute: {name} must be a Layout, but got {name}='NotALayout'. Make",
    ):
        explain_redistribute(**ends)


# ---------------------------------------------------------------------- pictures


def texts(path):
    """Give the texts of a picture; matplotlib writes each into a comment, too."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    root = ET.parse(path, parser).getroot()
    return [one.text.strip() for one in root.iter() if one.tag is ET.Comment]


def test_picture_says_what_is_held_and_moved(tmp_path):
    explained(GRID, (SUM, S0), (R, R), (8192, 4096), itemsize=2).save(tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    assert [text for text in found if text.startswith("rank")] == [f"rank {i}" for i in range(8)]
    for text in ("P(sum)@dp", "R@dp", "all_reduce", "dp: 2 ranks", "16 MiB received", "all_gather"):
        assert text in found
    assert "global shape [8192, 4096]; hatched: waits for a reduction" in found
    assert "64 MiB received, 64 MiB at least; 949.7 us by link model 'two-level'" in found
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]


def test_picture_says_what_it_leaves_out(tmp_path):
    mesh = AbstractMesh("cpu", (4, 8), mesh_dim_names=("dp", "tp"))
    shape = (8, 128, 64, 3)
    explained(mesh, (S0, S1), (S0, Shard(2)), shape).save(str(tmp_path / "plan.svg"))
    found = texts(tmp_path / "plan.svg")
    assert "drawn along dims 0, 1 of 4; what is not drawn: the cuts of dim 2" in found
    assert "the first 16 of 32 ranks" in found and "rank 16" not in found


@pytest.mark.parametrize("shape", [(), (6,), (0, 3), (2, 7, 3)], ids=str)
def test_picture_of_any_number_of_dims(tmp_path, shape):
    src = StridedShard(0, 2) if shape else SUM
    explained(LINE, (src,), (R,), shape).save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def held_colors(path):
    """Give the sets of fill colours by box, in the order they are drawn."""
    boxes = []
    for one in ET.parse(path).getroot().iter():
        style = one.get("style", "")
        if "fill: #ffffff; stroke: #999999" in style:
            boxes.append([])
        elif boxes and one.tag.endswith("use") and "fill: #" in style:
            boxes[-1].append(style.partition("fill: ")[2][:7])
    return boxes


def test_picture_colours_a_part_alike_wherever_it_goes(tmp_path):
    explained(LINE, (S0,), (R,), (8, 8)).save(tmp_path / "plan.svg")
    boxes = held_colors(tmp_path / "plan.svg")
    assert len(boxes) == 8 and all(len(box) == 1 for box in boxes[:4])
    own = [box[0] for box in boxes[:4]]
    assert len(set(own)) == 4
    assert all(box == own for box in boxes[4:])


def test_picture_of_another_kind_is_refused(tmp_path):
    with pytest.raises(
        HyperParallelError,
        match=r"Explanation.save: path must end in one of \('.svg', '.png', '.pdf'\), but got"
        r" path='.*plan.gif'. Name such a file.",
    ):
        explained(LINE, (S0,), (R,), (8, 8)).save(tmp_path / "plan.gif")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    file = tmp_path / "plan.png"

    def fails(figure, path, **how):
        path.write_bytes(b"half")
        raise OSError("no space left")

    found = explained(LINE, (S0,), (R,), (8, 8))
    found.save(file)
    before = file.read_bytes()
    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(OSError, match="no space left"):
        found.save(file)
    assert file.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [
        "plan.png"
    ]
