"""`mpistrat trace`: what it reads in a trace, draws and says."""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpistrat.__main__ import main
from mpistrat.trace.timeline import Timeline

MILLISECOND = 1_000_000
STEP = 100  # ms
ORANGE, YELLOW = (0xD5, 0x5E, 0x00), (0xF0, 0xE4, 0x42)  # the others are waited for; input


def record(
    folder: Path,
    steps: int,
    late: int,
    *,
    moves_only: bool = False,
    reads: int = 1,
    work: int = 10,
    other_thread: bool = False,
) -> None:
    """Two ranks: rank 1 enters the collective of each step `late` ms after rank 0; it moves bytes for 5 ms.

    Args:
        reads: ms that a rank reads input.
        work: ms until rank 0 enters the collective.
        other_thread: not the step's thread makes the collectives.
    """
    for rank in range(2):
        pool = ThreadPoolExecutor(1, "A helper")
        timeline = Timeline(str(folder), rank, 2, f"node{rank}", "clock")
        run = timeline.kind("strategy.run", "range", function="step")
        read = timeline.kind("next(iterator)", "range")
        call = timeline.kind("all_reduce", "collective", communicator="c", ranks=2)
        began = timeline.now()
        for step in range(steps):
            start = began + step * STEP * MILLISECOND
            entered = start + (work + late * rank) * MILLISECOND
            together = start + (work + late) * MILLISECOND
            left = together + 5 * MILLISECOND
            if reads:
                timeline.add(read, start, start + reads * MILLISECOND)
            times = entered, 0 if moves_only else together, left
            if other_thread:
                pool.submit(timeline.add_collective, call, *times, step).result(60)
            else:
                timeline.add_collective(call, *times, step)
            timeline.add(run, start + reads * MILLISECOND, left)
        timeline.close()
        pool.shutdown()


def test_seconds_of_each_rank_after_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, steps=11, late=40, reads=2)
    assert main(["trace", str(tmp_path)]) == 0
    *_, first, second, waited, _ = capsys.readouterr().out.splitlines()
    for rank, (line, waits) in enumerate(((first, 0.4), (second, 0.0))):
        assert line.startswith(f"rank {rank} on node{rank} ")
        seconds = [float(number) for number in re.findall(r"([\d.]+) s ", line)]
        # In all, waiting, moving bytes, input.
        assert seconds == pytest.approx([0.55, waits, 0.05, 0.02], abs=0.011)
    assert waited == "The others waited longest for rank 1: 0.40 of 0.40 s of waiting."


def rows_with(folder: Path, colour: tuple[int, int, int]) -> list[int]:
    """How many pixels of the picture's upper and lower half have the colour."""
    from matplotlib import image

    pixels = (image.imread(folder / "timeline.png")[:250, :, :3] * 255).round().astype(int)
    same = (pixels == colour).all(axis=2)
    middle = len(same) // 2
    return [int(same[:middle].sum()), int(same[middle:].sum())]


def test_the_picture_and_the_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, steps=21, late=40)
    assert main(["trace", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/timeline.png shows 2 ranks, steps 7 to 14 of 21.\n" in output
    assert output.endswith(
        "The others waited longest for rank 1: 0.80 of 0.80 s of waiting.\n"
        "Look in the picture for the work of rank 1 while the others wait.\n"
    )
    upper, lower = rows_with(tmp_path, ORANGE)
    assert upper > 20 * max(lower, 1)  # rank 0 waits
    assert min(rows_with(tmp_path, YELLOW)) > 0


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ({"late": 0, "moves_only": True}, "Move fewer bytes: "),
        ({"late": 0, "reads": 9}, "Read faster: "),
        ({"late": 3, "reads": 9}, "Read faster: "),
        ({"late": 0}, "Move fewer bytes: "),
    ],
)
def test_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: dict, advice: str) -> None:
    record(tmp_path, steps=4, **how)
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(advice)


def test_without_input_it_says_nothing_of_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a program of torch.distributed."""
    record(tmp_path, steps=4, late=0, reads=0, work=90)
    assert main(["trace", str(tmp_path)]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()[-4:]
    assert head.startswith("after the first step ")
    for line in (first, second):
        assert re.fullmatch(r"rank \d on node\d +[\d.]+ s( +[\d.]+ s +[\d.]+%){2} +–", line)
    record(tmp_path, steps=4, late=0, work=90)
    assert main(["trace", str(tmp_path)]) == 0
    faster = (
        "Each rank computes for more than nine tenths of its time: there is little else to mend."
    )
    assert capsys.readouterr().out.splitlines()[-1] == faster


def test_waits_beside_the_training_are_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A communication thread waits while the step computes. Its row stands below its rank's."""
    from matplotlib import pyplot

    record(tmp_path, steps=4, late=60, other_thread=True)
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        assert main(["trace", str(tmp_path)]) == 0
    _, _, first, second, waited, last = capsys.readouterr().out.splitlines()[-6:]
    for line in (first, second):
        assert "    0.00 s   0.0%    0.00 s   0.0%    0.00 s " in line
    assert waited == "The others waited longest for rank 1: 0.18 of 0.18 s of waiting."
    assert last.startswith("Each rank computes for more than nine tenths of its time")
    (axes,) = pyplot.gcf().axes
    pyplot.close()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0 on node0",
        "A helper_0, rank 0",
        "rank 1 on node1",
        "A helper_0, rank 1",
    ]
    # Steps 2 to 4, each with its input and its computation, or its wait and its bytes.
    assert all(5 <= len(bars.get_paths()) <= 7 for bars in axes.collections)


def test_a_trace_of_two_steps_is_summed_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, steps=2, late=40)
    assert main(["trace", str(tmp_path)]) == 0
    *_, head, first, _, _, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("the whole trace      ")
    assert re.findall(r"([\d.]+) s ", first)[:2] == ["0.11", "0.08"]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"ph":"X"',
        '{"ph":"X","pid":0,"tid":1}',
        '{"ph":"X","pid":0,"tid":1,"name":"step","ts":1,"dur":1}',
        '{"ph":"X","pid":0,"tid":1,"name":"wait for the others","cat":"waiting","ts":1,"dur":1}',
    ],
)
def test_a_damaged_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    assert main(["trace", str(tmp_path)]) == 1
    error = "is damaged, or has no events: remove it, and trace the job again"
    assert capsys.readouterr().err == f"mpistrat trace: {tmp_path}/trace.json {error}\n"


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, steps=2, late=1)
    (tmp_path / "timeline.png").mkdir()
    assert main(["trace", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mpistrat trace: [Errno 21] Is a directory: ")
    assert error.count("\n") == 1


def test_an_older_trace_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text("{}")
    os.utime(tmp_path / "trace.json", (1, 1))
    record(tmp_path, steps=2, late=1)
    for made in (1, 0):
        assert main(["trace", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("events of 2 ranks are in") == made


def test_without_a_trace_or_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["trace", str(tmp_path)]) == 1
    assert "no part of a trace (rank-0.part, …) is in " in capsys.readouterr().err
    record(tmp_path, steps=2, late=40)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["trace", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.err == "mpistrat trace: a picture needs matplotlib: pip install matplotlib\n"
    assert "rank 1 on node1" in printed.out
    assert f"\nLook in {tmp_path}/trace.json for the work of rank 1 while " in printed.out
