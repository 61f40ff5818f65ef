"""Records each test as it starts and ends: scripts/test counts even when a job dies, and goes on after it."""

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest


class ResultLines:
    """A pytest plugin that writes lines `{"test": …, "outcome": …, "text": …, …}`.

    An outcome is started, passed, failed or skipped. With --collect-only it is collected, and "slow" is the text of the
    tests that are.
    `seconds` are of the wall clock; `cpu` are the seconds that this process and the children it waited for computed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._outcome, self._text = "passed", ""
        self._began = self._began_cpu = 0.0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                slow = item.get_closest_marker("slow") is not None
                self._write(item.nodeid, "collected", "slow" if slow else "")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._text = "passed", ""
        self._began, self._began_cpu = time.monotonic(), _cpu_seconds()
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome = report.outcome
        if report.failed:
            sections = [f"{f' {title} ':-^80}\n{text}" for title, text in report.sections]
            self._text = "\n".join([report.longreprtext, *sections])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds, cpu = time.monotonic() - self._began, _cpu_seconds() - self._began_cpu
        self._write(nodeid, self._outcome, self._text, seconds, cpu)

    def _write(
        self, nodeid: str, outcome: str, text: str = "", seconds: float = 0.0, cpu: float = 0.0
    ) -> None:
        record = asdict(Result(nodeid, outcome, text, round(seconds, 3), round(cpu, 3)))
        self._file.write(json.dumps(record) + "\n")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True)
class Result:
    """How one test went; `cpu` is in seconds, too, and of rank 0 alone where a job of several ranks runs the test."""

    test: str
    outcome: str
    text: str = ""
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def idle(self) -> float:
        """Seconds in which nothing was computed, or more: two processes may have computed at a time."""
        return max(self.seconds - self.cpu, 0.0)


@dataclass
class Results:
    """What a file of result lines says so far; a test that started and never ended has failed."""

    of: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Results":
        results = cls()
        if path.exists():
            for line in path.read_text().splitlines():
                result = Result(**json.loads(line))
                results.of[result.test] = result
        return results

    def tests(self, *outcomes: str) -> list[str]:
        return [result.test for result in self.of.values() if result.outcome in outcomes]

    def count(self, *outcomes: str) -> int:
        return len(self.tests(*outcomes))


def leave_out(config: pytest.Config, items: list[pytest.Item], tests: Collection[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in tests])
    items[:] = [item for item in items if item.nodeid not in tests]
