"""What a rank does to be observed: its record in the job's folder, and the node's observer.

It begins when mpistrat is imported, if a launcher started this process: a rank may die before it has built a strategy.
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

# It gives itself to init, so that a program that waits for its children does not wait for it.
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
    """This process's record, and what is held as long as the process lives: the folder, and a FIFO in it."""

    folder: JobFolder
    record: RankRecord
    line: int


current: Observed | None = None  # what `join` returned last


def begin() -> bool:
    """Be observed from now on, if a launcher says which of its ranks this process is. Starts no MPI, raises nothing.

    Returns: whether it is a rank and no process that a rank has started; False once it is observed.
    """
    try:
        rank_and_size = launcher.certain_rank()
    except TopologyError:  # whoever asks for the topology is told
        return False
    if rank_and_size is None or current is not None or rank_pid() or _is_of_multiprocessing():
        return False
    name = job_of(os.getpid())
    if not name and launcher.is_first_on_node():
        name = os.urandom(16).hex()  # the others will learn of it when they have MPI
    if not name:
        return True
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
    """Whether this is a worker that a Python program has started, and no rank."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def join(folder: JobFolder, rank: int, size: int) -> Observed:
    """Have this process's record in `folder`. The record's limits are not set yet.

    Raises: OSError, also when another process that lives has the rank's record.
    """
    global current
    if current is not None:
        current.record.state = LEFT
        os.unlink(record_of(current.folder.path, current.record.rank))
    path = record_of(folder.path, rank)
    with contextlib.suppress(FileNotFoundError):
        # Of a program that the launcher's script ran before, or that this process ran before an exec.
        before = RankRecord(path)
        if before.pid == os.getpid() or state_of(before.pid, before.began) in DEAD:
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


def remember_mappings() -> None:
    """Have the files in memory that MPI has mapped here removed when the job has ended, however it ends."""
    if current is not None:
        with contextlib.suppress(OSError):
            current.folder.remember_mappings(current.record.rank)


def wait_until_observed() -> None:
    """Return once an observer watches this process, or after a while: it could not tell how one died before."""
    if observed := current:
        soon(lambda: observed.record.looked > 0, deadlines.RANK_WAITS_FOR_FIRST_LOOK_OF_OBSERVER)


def start_observer(folder: str) -> None:
    """Have a process observe the ranks whose records are in `folder`, or will be; it ends if there is one already.

    It has no descriptor of ours: it outlives this process, and who waits for the end of a pipe would wait for it.
    """
    import subprocess  # here, because it makes importing mpistrat slower

    python = python_of_helpers()
    if python is None:
        return
    command = [python, "-I", "-S", "-c", _MAIN, folder]
    null, environ = subprocess.DEVNULL, launcher.environment_of_children()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no memory, no process
        subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True, env=environ
        ).wait(deadlines.RANK_WAITS_FOR_START_OF_OBSERVER)  # it forks, and ends


def say(text: str) -> bool:
    """Have the observer write `text` to stderr, of another process; returns whether it has.

    For a rank that has no usable stderr of its own. It may end as soon as this returns.
    """
    if current is None or os.getpid() != current.record.pid:
        return False
    record = current.record
    with contextlib.suppress(OSError):
        with create(words_of(current.folder.path, record.rank)) as file:
            file.write(text)
        record.say = 1
        return soon(lambda: not record.say, deadlines.RANK_WAITS_FOR_WORDS_OF_OBSERVER)
    return False


def announce_exit() -> Observed | None:
    """Have the observer make ready: this process is about to end, and if no other does, that is a failure.

    The launcher may end all in the same moment, and the observer may get a core only then.
    Returns: what others see of this process, if it is a rank that they expect to go on; else None.
    """
    if current is None or os.getpid() != current.record.pid:
        return None
    record = current.record
    if record.state != RUNNING or not record.slots():
        return None
    record.exits = ANNOUNCED
    with contextlib.suppress(OSError):
        os.write(current.line, b"\n")
        soon(lambda: record.exits != ANNOUNCED, deadlines.RANK_WAITS_FOR_OBSERVER_TO_SEE_EXIT)
    return current


def wake_observer(record: RankRecord) -> None:
    """If it is stopped: it would stay for ever."""
    if state_of(record.observer) == "T" and command_of(record.observer).endswith(record.folder):
        with contextlib.suppress(OSError):
            os.kill(record.observer, signal.SIGCONT)


def has_lost_files() -> bool:
    """Whether the program has closed a descriptor that it did not open: MPI's are then closed, too."""
    if current is None or os.getpid() != current.record.pid:
        return False
    with contextlib.suppress(OSError):
        return not stat.S_ISFIFO(os.fstat(current.line).st_mode)
    return True


def _leave(record: RankRecord) -> None:
    """The program ends. A rank of a strategy has said so (`JobEnd`); of others the observer has to know it.

    The observer tells ranks that are still to start that they would wait for this rank in vain.
    """
    if os.getpid() == record.pid:
        if record.state == RUNNING and not record.slots():
            record.state = LEFT
        wake_observer(record)


def speak_on_signal(record: RankRecord, stacks: str) -> None:
    """Let others ask for this process's Python stack, even while it holds the GIL; explain fatal signals, too."""
    file = private(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # open until the process ends
    if not faulthandler.is_enabled():
        faulthandler.enable(file)
    # By handlers that Python does not know of, too.
    taken = signals_of(os.getpid(), "SigCgt", "SigIgn")
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            # Of the thread that gets the signal, which is the main thread while it lives: those of threads that go on
            # meanwhile cannot be read without risking a crash.
            faulthandler.register(number, file, all_threads=False, chain=False)
            record.stack_signal = number
            return
