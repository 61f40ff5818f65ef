"""Ranges where nothing is traced, and where something is."""

import json
from pathlib import Path

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
