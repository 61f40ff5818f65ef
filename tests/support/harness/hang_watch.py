"""A test that does not end is a failure that shows where every rank stands, and then ends the job.

Nothing here needs MPI, or the GIL of a stuck rank: each rank has its own clock, and they meet in a
folder of small files.

- at the limit, faulthandler's C thread writes the stacks of all Python threads to `stacks-rankN.txt`
- a few seconds later one rank prints all those files, and every rank leaves with HUNG_EXIT_CODE
- a rank that cannot run Python any more is ended by SIGALRM
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

HUNG_EXIT_CODE = 86
SECONDS_AFTER_A_FAILURE = 5.0  # how long the other ranks may go on once one rank has failed
SECONDS_TO_WRITE_STACKS = (
    3.0  # ranks reach their limits a moment apart; nobody leaves before all have written
)
SECONDS_BEFORE_SIGALRM = 6.0  # only for a rank whose Python threads no longer run


class HangWatch:
    """Watches one named piece of work at a time: `with watch.limit("test_x", 60): …`, which may be nested."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._stacks = (folder / f"stacks-rank{rank}.txt").open("w")
        # Tests run with stderr captured; this is the terminal.
        self._terminal = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")  # type: ignore[union-attr]
        self._lock = threading.Lock()
        self._work: list[_Work] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self._thread.start()

    def limit(self, name: str, seconds: float) -> "_Work":
        return _Work(self, name, seconds)

    def tell_failure(self, text: str) -> Path:
        """Tell the other ranks that this one failed; delete the returned file once they know."""
        path = self.folder / f"failed-rank{self.rank}.txt"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.rename(path)
        return path

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._stacks.close()
        self._terminal.close()

    def rearm(self) -> None:
        """Set the clocks to the innermost work (again: pytest cancels faulthandler's at each failure)."""
        with self._lock:
            self._set_clocks()

    def _set_clocks(self) -> None:
        if not self._work:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        left = max(self._work[-1].deadline - time.monotonic(), 0.01)
        faulthandler.dump_traceback_later(left, exit=False, file=self._stacks)
        signal.setitimer(
            signal.ITIMER_REAL, left + SECONDS_TO_WRITE_STACKS + SECONDS_BEFORE_SIGALRM
        )

    def _has_failure(self) -> bool:
        try:
            return any(self.folder.glob("failed-rank*.txt"))
        except FileNotFoundError:  # another rank has ended all tests, and removed it
            return False

    def _watch(self) -> None:
        while not self._closed.wait(0.1):
            with self._lock:
                if not self._work:
                    continue
                work = self._work[-1]
                if not work.hurried and self._has_failure():
                    work.hurried = True
                    work.deadline = min(work.deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
                    self._set_clocks()
                late = time.monotonic() - work.deadline
            if late > SECONDS_TO_WRITE_STACKS:
                self._end(work)

    def _end(self, work: "_Work") -> None:
        try:
            (self.folder / "stacks-printed").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(2.0)  # another rank prints; leaving now could end the job under it
        else:
            self._terminal.write(self._describe(work))
            self._terminal.flush()
        os._exit(HUNG_EXIT_CODE)

    def _describe(self, work: "_Work") -> str:
        if work.hurried:
            why = f"a rank failed and others still worked {SECONDS_AFTER_A_FAILURE:g} s later"
        else:
            why = f"not finished after {work.seconds:g} s"
        title = f" HUNG: {work.name}: {why} "
        return f"\n\n{title:=^100}\n" + stacks_text(self.folder)


class _Work:
    def __init__(self, watch: HangWatch, name: str, seconds: float) -> None:
        self._watch = watch
        self.name = name
        self.seconds = seconds
        self.hurried = False
        self.deadline = float("inf")

    def __enter__(self) -> None:
        self.deadline = time.monotonic() + self.seconds
        with self._watch._lock:
            self._watch._work.append(self)
            self._watch._set_clocks()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._watch._lock:
            self._watch._work.remove(self)
            self._watch._set_clocks()


def stacks_text(folder: Path) -> str:
    """What each rank was doing, and with what error those that failed did."""
    parts = []
    files = sorted(folder.glob("stacks-rank*.txt"))
    files.sort(key=lambda file: len(file.name))  # rank 10 after rank 9
    for path in files:
        rank = path.stem.removeprefix("stacks-")
        parts.append(f"{f' {rank} ':-^100}\n")
        failure = folder / f"failed-{rank}.txt"
        if failure.exists():
            parts.append(f"failed with:\n{failure.read_text().rstrip()}\nand now stands here:\n")
        parts.append(_without_harness(path.read_text()) or "wrote no stack: stopped, or gone\n")
    return "".join(parts)


def _without_harness(stacks: str) -> str:
    """Leave out this module's own thread, and pytest's frames below the test's."""
    harness = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>")
    threads = [text for text in stacks.split("\n\n") if "in _watch\n" not in text]
    lines = [line for text in threads for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if not any(part in line for part in harness)]
    return "".join(f"{line}\n" for line in ours)
