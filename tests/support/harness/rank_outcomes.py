"""One test, n ranks, one outcome: a pytest plugin for `mpiexec -n N python -m pytest --with-mpi`.

After each phase of a test (setup, call, teardown) the ranks tell each other how it went. A failure on
one rank is a failure on all, so that they stay in step, and rank 0, the only one that writes to the
terminal, shows what went wrong elsewhere.
`@pytest.mark.mpi(min_size=n)` and pytest-mpi's options mean what they mean there, except that a test
which asks for more ranks than there are is left out instead of skipped.
"""

import hashlib
import json
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support.harness.hang_watch import HangWatch

LARGEST_SIZE_FOR_ALL_TESTS = 4  # with more ranks only the tests that ask for more run
_PASSED, _SKIPPED, _FAILED = range(3)
_CODES = {"passed": _PASSED, "skipped": _SKIPPED, "failed": _FAILED}


@dataclass(frozen=True)
class Outcome:
    """How one phase of a test went on one rank."""

    code: int
    message: str = ""
    text: str = ""


class Agreement:
    """Exchanges outcomes on a communicator of its own, by polling, so that a HangWatch can end the wait."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm.Dup()
        self.rank: int = comm.rank
        self.size: int = comm.size

    def exchange(self, mine: Outcome) -> list[Outcome] | None:
        """Return every rank's outcome, or None if all are the same and none failed. All ranks call it."""
        from mpi4py import MPI

        worst_and_best = np.array([mine.code, -mine.code])
        _wait(self._comm.Iallreduce(MPI.IN_PLACE, worst_and_best, MPI.MAX))
        worst = int(worst_and_best[0])
        best = -int(worst_and_best[1])
        if worst == best and worst != _FAILED:
            return None
        return [Outcome(**fields) for fields in self._all_gather(vars(mine))]

    def _all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.empty(self.size, np.int64)
        _wait(self._comm.Iallgather(np.array([mine.size]), sizes))
        everything = np.empty(int(sizes.sum()), np.uint8)
        _wait(self._comm.Iallgatherv(mine, [everything, sizes]))
        ends = np.cumsum(sizes)
        return [
            json.loads(everything[end - size : end].tobytes())
            for size, end in zip(sizes, ends, strict=True)
        ]


def _wait(request: Any) -> None:
    pause = 0.0
    while not request.Test():
        time.sleep(pause)  # leaves the core to ranks that still work
        pause = min(pause + 20e-6, 1e-3)


class MPIOutcomes:
    """The plugin of one rank."""

    def __init__(self, config: pytest.Config, agreement: Agreement, watch: HangWatch) -> None:
        self._agreement = agreement
        self._watch = watch
        self.rank = agreement.rank
        self.size = agreement.size
        if self.rank > 0:
            _silence(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if not self._fits(_min_size(item))]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if self._fits(_min_size(item))]

    def _fits(self, min_size: int) -> bool:
        if self.size > LARGEST_SIZE_FOR_ALL_TESTS:
            return LARGEST_SIZE_FOR_ALL_TESTS < min_size <= self.size
        return min_size <= self.size

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks must be about to run the same tests, or the first difference hangs."""
        names = "\n".join(item.nodeid for item in session.items)
        digest = hashlib.sha256(names.encode()).hexdigest()
        code = int(digest[:8], 16) + session.testsfailed
        text = f"{len(session.items)} tests, {session.testsfailed} errors"
        outcomes = self._agreement.exchange(Outcome(code, text))
        if outcomes is not None and len({outcome.code for outcome in outcomes}) > 1:
            counts = [f"rank {rank}: {each.message}" for rank, each in enumerate(outcomes)]
            raise pytest.UsageError(f"the ranks collected different tests ({', '.join(counts)})")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        others = None
        mine = Outcome(_CODES[report.outcome])
        if report.failed:
            mine = Outcome(mine.code, _short_message(report), _full_text(report))
            others = self._watch.tell_failure(mine.text)
        outcomes = self._agreement.exchange(mine)
        if others is not None:
            others.unlink(missing_ok=True)
        if outcomes is not None:
            self._share(report, outcomes)
        return report

    def _share(self, report: pytest.TestReport, outcomes: Sequence[Outcome]) -> None:
        skipped: list[str] = []
        failures: list[str] = []  # of other ranks
        texts: dict[str, str] = {}
        for number, outcome in enumerate(outcomes):
            rank = f"rank {number}"
            if outcome.code == _SKIPPED:
                skipped.append(rank)
            elif outcome.code == _FAILED and number != self.rank:
                failures.append(f"failed on {rank}: {outcome.message}")
                texts[rank] = outcome.text
        if not report.failed:
            skips = f"skipped on some ranks only: {', '.join(skipped)}"
            report.outcome = "failed"
            report.longrepr = "; ".join(failures) or skips
        shown = {str(report.longrepr)} if failures else set()
        for rank, text in texts.items():
            report.sections.append((rank, "as above" if text in shown else text))
            shown.add(text)


def _min_size(item: pytest.Item) -> int:
    return max(
        (int(mark.kwargs.get("min_size", 1)) for mark in item.iter_markers("mpi")), default=1
    )


def _short_message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", None) or report.longreprtext).strip()
    if not message:
        return "no message"
    return message.splitlines()[0][:300]


def _full_text(report: pytest.TestReport) -> str:
    texts = [report.longreprtext]
    for title, captured in report.sections:
        if captured.strip():
            texts.append(f"{f' {title} ':-^80}\n{captured}")
    return "\n".join(texts)


def _silence(config: pytest.Config) -> None:
    """Give this rank a reporter that writes nowhere."""
    config.pluginmanager.unregister(name="terminalreporter")
    silent = pytest.TerminalReporter(config, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
    config.pluginmanager.register(silent, "terminalreporter")
