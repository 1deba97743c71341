# SPDX-License-Identifier: Apache-2.0
"""The demo in examples/ runs as its users run it, and its verdict can be trusted both ways."""

import importlib.util

import pytest

from support.demo import SMALL, run_demo, run_demo_once, verdict


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--sequence-parallel",),
        ("--tied", "--bias"),
        ("--sequence-parallel", "--tied", "--bias"),
    ],
    ids=" ".join,
)
def test_tensor_parallel_training_agrees_with_one_process(flags):
    done = run_demo_once(*SMALL, *flags)
    assert verdict(done) == ["PASS"], done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=" ".join)
def test_a_forgotten_gradient_reduction_is_found(tmp_path, flags):
    done = run_demo(tmp_path, *SMALL, "--break-gradient-reduction", *flags)
    (line,) = verdict(done)
    assert line.startswith("FAIL: the loss differs by "), done.stdout
    assert "the parameter " in line, done.stdout
    assert done.returncode != 0, done.stdout


def test_the_plot_is_written_whole_and_leaves_nothing_else(tmp_path):
    done = run_demo(tmp_path, "--steps", "2", "--model-dim", "64", "--plot", "curves.png")
    assert verdict(done) == ["PASS"], done.stdout
    left = {path.name: path.read_bytes()[:4] for path in tmp_path.iterdir()}
    if importlib.util.find_spec("matplotlib"):
        assert left == {"curves.png": b"\x89PNG"}
    else:
        assert left == {}
        assert "plot: none, as matplotlib is not installed" in done.stdout


def test_training_on_a_folder_of_text(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("to be, or not to be: that is the question. " * 50)
    (tmp_path / "notes" / "b.bin").write_bytes(bytes(5000))  # not text: left out
    done = run_demo(tmp_path, *SMALL, "--data", "notes")
    assert verdict(done) == ["PASS"], done.stdout
    assert "2,150 bytes of notes" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "3"), "--tp 3 needs 3 processes, but 2 were started"),
        (("--kv-heads", "1"), "1 key/value heads cannot be divided among 2 ranks"),
    ],
    ids=["tp", "kv-heads"],
)
def test_what_the_ranks_cannot_share_is_refused_with_a_reason(tmp_path, flags, message):
    done = run_demo(tmp_path, *flags)
    assert f"train_tp.py: error: {message}" in done.stdout
    assert 'train_tp.py", line' not in done.stdout, "a traceback instead of a reason"
    assert done.returncode != 0
    assert not verdict(done)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heads", "6", "--model-dim", "72"), "6 query heads cannot share 4 key/value heads"),
        (("--model-dim", "100"), "model width 100 must be a multiple of 16"),
        (("--data", "nowhere"), "nowhere is not a folder"),
        (("--data", "."), "too little text in .: 0 bytes"),
        (("--plot", "nowhere/a.png"), "--plot: there is no folder nowhere"),
    ],
    ids=["heads", "width", "no data", "little data", "plot"],
)
def test_a_bad_flag_is_refused_before_any_rank_waits_for_another(tmp_path, flags, message):
    # One of the two processes, alone: it would wait for ever if it went as far as to connect.
    done = run_demo(tmp_path, *flags, launcher=(), WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    assert f"train_tp.py: error: {message}" in done.stdout
    assert "Traceback" not in done.stdout
    assert done.returncode == 2


def test_started_without_the_launcher_it_says_how_to_start_it(tmp_path):
    done = run_demo(tmp_path, launcher=(), WORLD_SIZE="0")
    assert "start it as: torchrun --nproc-per-node 2 examples/train_tp.py" in done.stdout
    assert done.returncode == 2
