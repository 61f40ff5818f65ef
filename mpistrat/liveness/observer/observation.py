"""Makes this process observable: puts its record into the job's folder, and starts the node's observer.

This begins when mpistrat is imported, if a launcher started this process, because a rank may die before it builds a
strategy.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import stat
import sys
from dataclasses import dataclass

from mpistrat.cluster_resolver import launcher
from mpistrat.errors import TopologyError
from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon
from mpistrat.liveness.processes import DEAD, command_of, job_of, signals_of, state_of
from mpistrat.liveness.records.job_folder import JobFolder, line_of, record_of, stacks_of, words_of
from mpistrat.liveness.records.record import ANNOUNCED, LEFT, RUNNING, RankRecord
from mpistrat.machine.interpreter import IMPORT_WITHOUT_INIT, python_of_helpers
from mpistrat.machine.private_files import create, private
from mpistrat.settings import rank_pid

# The observer's program. It forks and the parent ends, so that a rank that waits for its children need not wait for it.
_MAIN = f"""
import os
if os.fork():
    os._exit(0)
{IMPORT_WITHOUT_INIT}
from mpistrat.liveness.observer.observer import main
main(sys.argv[1])
"""


@dataclass(frozen=True)
class Observed:
    """The folder, record and FIFO by which other processes observe this process until it ends. Made by: `join`.

    Attributes:
        folder: the job's folder.
        record: this process's record in the folder.
        line: the descriptor of the rank's FIFO, held open. When it closes, the observer sees that the process has
            closed its files or died.
    """

    folder: JobFolder
    record: RankRecord
    line: int


current: Observed | None = None  # the last result of `join`


def begin() -> bool:
    """Make this process observable from now on, if the launcher's variables give its rank.

    It makes this rank's record in the job's folder, and starts the node's observer if the folder is new. If the program
    exits without a strategy, `_leave` notes this in the record. It starts no MPI and raises nothing.

    Called by: `rank_end.begin`.

    Returns: True if this process is a rank and was not observed before; it may still have no record, because no folder
        can be made or the job has no name yet. False for a process that a rank has started.
    """
    try:
        rank_and_size = launcher.certain_rank()
    except TopologyError:  # the cluster resolver raises it again
        return False
    if rank_and_size is None or current is not None or rank_pid() or _is_of_multiprocessing():
        return False
    name = job_of(os.getpid())
    if not name:
        if not launcher.is_first_on_node():
            return True
        name = os.urandom(16).hex()  # the node's other ranks learn the name when MPI runs
    with contextlib.suppress(OSError):
        folder, new = JobFolder.create(name)
        try:
            atexit.register(_leave, join(folder, *rank_and_size).record)
        except FileExistsError:  # the rank lives, and has started this process
            folder.leave()
            return False
        if new:
            start_observer(folder.path)
    return True


def _is_of_multiprocessing() -> bool:
    """Whether Python's multiprocessing has started this process, so that it is no rank."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def join(folder: JobFolder, rank: int, size: int) -> Observed:
    """Make this process's record in `folder`, set `current`, and return it. The record has no limits yet.

    It opens the rank's FIFO, and registers the signal that asks for this process's stack. If this process had a record
    in another folder, that is removed.

    Raises: OSError if a file cannot be made; FileExistsError if another living process has the rank's record.
    """
    global current
    if current is not None:
        current.record.state = LEFT
        os.unlink(record_of(current.folder.path, current.record.rank))
    path = record_of(folder.path, rank)
    with contextlib.suppress(FileNotFoundError):
        # The record may be left by the script's last program, or by this process before an exec.
        before = RankRecord(path)
        is_own = before.pid == os.getpid()
        if is_own or state_of(before.pid, before.began) in DEAD:
            os.unlink(path)
    line = line_of(folder.path, rank)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(line, 0o600)
    held = os.open(line, os.O_RDWR)
    try:
        record = RankRecord(path, create=True)
    except OSError:
        os.close(held)
        raise
    speak_on_signal(record, stacks_of(folder.path, rank))
    record.start(rank, size, os.uname().nodename)
    current = Observed(folder, record, held)
    return current


def _of_this_process() -> Observed | None:
    """Return `current`; None in a fork of the process that has called `join`."""
    return current if current and current.record.pid == os.getpid() else None


def remember_mappings() -> None:
    """Write a list of MPI's files in memory that this process maps, so that the observer removes them after the job.

    It does nothing if this process is not observed. Called by: a rank after MPI's start, and before it ends the job.
    """
    if current is not None:
        with contextlib.suppress(OSError):
            current.folder.remember_mappings(current.record.rank)


def wait_until_observed() -> None:
    """Wait at most 1 s until an observer has looked at this process; return at once if it has no record in a folder.

    The observer can report how a rank died only if it has seen the rank alive.
    """
    if observed := current:
        soon(lambda: observed.record.looked > 0, deadlines.RANK_WAITS_FOR_FIRST_LOOK_OF_OBSERVER)


def start_observer(folder: str) -> None:
    """Start a process that observes the ranks with records in `folder`; it ends at once if another observer runs.

    It waits at most 10 s until Python has started there, and raises nothing if it cannot be started. The observer
    inherits no descriptor, because it outlives this process, and the reader of a pipe would wait for it.
    """
    import subprocess  # imported here, so that `import mpistrat` stays fast

    python = python_of_helpers()
    if python is None:
        return
    command = [python, "-I", "-S", "-c", _MAIN, folder]
    null = subprocess.DEVNULL
    environ = launcher.environment_of_children()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no memory for a process
        subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True, env=environ
        ).wait(deadlines.RANK_WAITS_FOR_START_OF_OBSERVER)  # the child of a fork goes on


def say(text: str) -> bool:
    """Have the observer print `text` on the stderr of another rank or of the launcher.

    Called by: a rank that is about to end and has no usable stderr.
    Returns: True if the observer has taken the text within 1.5 s; False if not, or if this process is not observed.
    """
    observed = _of_this_process()
    if observed is None:
        return False
    record = observed.record
    with contextlib.suppress(OSError):
        with create(words_of(observed.folder.path, record.rank)) as file:
            file.write(text)
        record.say = 1
        return soon(lambda: not record.say, deadlines.RANK_WAITS_FOR_WORDS_OF_OBSERVER)
    return False


def announce_exit() -> Observed | None:
    """Tell the observer that this process is about to end by os._exit(0), and wait at most 1 s for its answer.

    If no other rank ends, the exit is a failure. The observer must know of it before, because the launcher may then
    kill all ranks at once.

    Returns: `current`; None, and nothing is announced, if this process is not observed, if its program has ended, or
        if it has no communicator.
    """
    observed = _of_this_process()
    if observed is None:
        return None
    record = observed.record
    if record.state != RUNNING or not record.slots():
        return None
    record.exits = ANNOUNCED
    with contextlib.suppress(OSError):
        os.write(observed.line, b"\n")
        soon(lambda: record.exits != ANNOUNCED, deadlines.RANK_WAITS_FOR_OBSERVER_TO_SEE_EXIT)
    return observed


def wake_observer(record: RankRecord) -> None:
    """Send SIGCONT to the observer of `record` if it is stopped (state T), because it would stay for ever."""
    is_stopped = state_of(record.observer) == "T"
    if is_stopped and command_of(record.observer).endswith(record.folder):
        with contextlib.suppress(OSError):
            os.kill(record.observer, signal.SIGCONT)


def has_lost_files() -> bool:
    """Whether the program has closed this rank's FIFO, and so most likely MPI's files, too; False if not observed."""
    observed = _of_this_process()
    if observed is None:
        return False
    with contextlib.suppress(OSError):
        return not stat.S_ISFIFO(os.fstat(observed.line).st_mode)
    return True


def _leave(record: RankRecord) -> None:
    """At exit, set the record's state to LEFT if this rank has built no strategy; otherwise `JobEnd` sets the state.

    So the observer can report ranks that wait for this rank to start. It also wakes up a stopped observer.
    """
    if os.getpid() == record.pid:
        if record.state == RUNNING and not record.slots():
            record.state = LEFT
        wake_observer(record)


def speak_on_signal(record: RankRecord, stacks: str) -> None:
    """Have faulthandler write the main thread's Python stack to the file `stacks` on a signal, even if the GIL is held.

    It takes the highest free real-time signal and writes its number to the record; 0 stays there if none is free.
    faulthandler also writes the stacks to the file on a fatal signal, unless the program has enabled faulthandler.
    """
    # The file stays open until the process ends.
    file = private(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if not faulthandler.is_enabled():
        faulthandler.enable(file)
    # The kernel also knows handlers that were not set by Python.
    taken = signals_of(os.getpid(), "SigCgt", "SigIgn")
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            # faulthandler writes only the stack of the thread that gets the signal: the main thread, while it lives.
            # Reading the stack of a thread that runs meanwhile may crash.
            faulthandler.register(number, file, all_threads=False, chain=False)
            record.stack_signal = number
            return
