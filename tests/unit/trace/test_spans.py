"""Ranges where nothing is traced, and where something is."""

import json
from pathlib import Path
from typing import Any

import pytest

import mpistrat as ms
from mpistrat.trace import spans
from mpistrat.trace.ranges import Ranges
from mpistrat.trace.timeline import Timeline


def test_without_a_trace_an_object_that_does_nothing_stands_there() -> None:
    ms.OneDeviceStrategy("cpu").run(lambda: None)
    assert type(spans.current) is spans.NoSpans
    with spans.current.range("a"), spans.current.run(print):
        pass
    assert spans.current.range("a") is spans.current.range("b")


def test_steps_of_a_replica_are_on_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning of `replica()`, or the optimizer's step before, to the end of the optimizer's step."""
    timeline = Timeline(str(tmp_path), 0, 1, "node", "clock")
    ranges = Ranges(timeline)
    monkeypatch.setattr(spans, "current", ranges)
    around_steps: list[Any] = []
    ranges.watch_optimizers(lambda *hooks: around_steps.extend(hooks))
    before, after = around_steps
    strategy = ms.OneDeviceStrategy("cpu")

    def step() -> None:
        before(None, (), {})
        after(None, (), {})

    step()
    with strategy.replica():
        with strategy.scope(), strategy.replica():
            step()
        step()
    step()
    timeline.close()
    lines = [json.loads(line) for line in Path(timeline.path).read_text().splitlines()]
    kinds = {
        line["kind"]: line["name"] for line in lines if isinstance(line, dict) and "kind" in line
    }
    rows = [(kinds[line[0]], line) for line in lines if isinstance(line, list)]
    assert [name for name, _ in rows] == [
        "NoneType.step",
        *["NoneType.step", "step"] * 2,
        "NoneType.step",
    ]


def test_a_range_is_on_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(str(tmp_path), 0, 1, "node", "clock")
    monkeypatch.setattr(spans, "current", Ranges(timeline))
    strategy = ms.OneDeviceStrategy("cpu")

    def step() -> float:
        return 1.0

    with pytest.raises(KeyError), spans.current.range("fails"):
        raise KeyError
    strategy.reduce("mean", strategy.run(step), axis=None)
    timeline.close()
    lines = [json.loads(line) for line in Path(timeline.path).read_text().splitlines()]
    kinds = {line["kind"]: line for line in lines if isinstance(line, dict) and "kind" in line}
    names = [kinds[line[0]]["name"] for line in lines if isinstance(line, list)]
    assert names == ["fails", "strategy.run", "strategy.reduce"]
    assert [kind["told"] for kind in kinds.values() if kind["name"] == "strategy.run"] == [
        {"function": step.__qualname__}
    ]
