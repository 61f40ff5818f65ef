"""Records each test as it starts and ends: scripts/test counts even when a job dies, and goes on after it."""

import json
import os
import time
from collections.abc import Collection, Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.forked import jobs as forked

_TAKEN = ("seconds", "cpu", "why_long")  # the properties of a report that a Result has, too


class Stopwatch:
    """A pytest plugin that says in the last report of each test how long it took; in each process that runs tests."""

    def __init__(self) -> None:
        self._began = self._began_cpu = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._began = time.monotonic()
        self._began_cpu = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            seconds = time.monotonic() - self._began
            cpu = _cpu_seconds() - self._began_cpu
            mark = item.get_closest_marker("long")
            report.user_properties += [
                ("seconds", round(seconds, 3)),
                ("cpu", round(cpu, 3)),
                ("why_long", str(mark.args[0]) if mark else ""),
            ]
        return report


class ResultLines:
    """A pytest plugin that writes lines of JSON, each a `Result`; in the process that pytest reports to.

    An outcome is started, passed, failed or skipped, and with --collect-only collected.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._running: dict[str, Result] = {}  # several, where several processes run tests

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(Result(report.nodeid, "failed"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                self._write(Result(item.nodeid, "collected"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = Result(nodeid, "passed")
        self._write(Result(nodeid, "started"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._running[report.nodeid]
        if report.failed or (report.skipped and result.outcome == "passed"):
            result = replace(result, outcome=report.outcome)
        if report.failed:
            sections = [f"{f' {title} ':-^80}\n{text}" for title, text in report.sections]
            result = replace(result, text="\n".join([report.longreprtext, *sections]))
        if report.when == "teardown":
            took: dict[str, Any] = dict(report.user_properties)
            result = replace(result, **{name: took[name] for name in _TAKEN})
        self._running[report.nodeid] = result

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(self._running.pop(nodeid))

    def _write(self, result: "Result") -> None:
        self._file.write(json.dumps(asdict(result)) + "\n")


def _cpu_seconds() -> float:
    """Of this process, of the children that it has waited for, and of ranks that were forked for it."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + forked.cpu_seconds


@dataclass(frozen=True)
class Result:
    """How one test went; `cpu` is in seconds, too, and of rank 0 alone where a job of several ranks runs the test."""

    test: str
    outcome: str
    text: str = ""
    seconds: float = 0.0
    cpu: float = 0.0
    why_long: str = ""  # what @pytest.mark.long says

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
