"""Signals are noted, once, twice, by several; and do what they did before where nobody listens any more."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpistrat.fault_tolerance import signal_flag
from mpistrat.fault_tolerance.signal_flag import SignalFlag

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
TOP = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (USR1, USR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nothing_has_come() -> None:
    assert SignalFlag([USR1]).number == 0


def test_each_flag_notes_its_own_signals() -> None:
    first, second = SignalFlag([USR1]), SignalFlag([USR1, USR2])
    signal.raise_signal(USR2)
    assert (first.number, second.number) == (0, USR2)
    signal.raise_signal(USR1)
    signal.raise_signal(USR1)
    assert (first.number, second.number) == (USR1, USR1)


def test_the_handler_that_was_there_is_called_after_it_was_noted() -> None:
    seen = []
    signal.signal(USR1, lambda number, frame: seen.append((number, flag.number)))
    flag = SignalFlag([USR1])
    signal.raise_signal(USR1)
    assert seen == [(USR1, USR1)]


def test_it_is_called_once_with_several_flags() -> None:
    seen = []
    signal.signal(USR1, lambda number, frame: seen.append(number))
    flags = [SignalFlag([USR1]) for _ in range(3)]
    signal.raise_signal(USR1)
    assert seen == [USR1]
    assert [flag.number for flag in flags] == [USR1] * 3


def test_a_handler_set_later_that_calls_ours() -> None:
    first = SignalFlag([USR1])
    ours = signal.getsignal(USR1)
    seen = []

    def later(number: int, frame: object) -> None:
        seen.append(number)
        ours(number, frame)  # type: ignore[operator, misc, arg-type]

    signal.signal(USR1, later)
    second = SignalFlag([USR1])
    signal.raise_signal(USR1)
    assert seen == [USR1]
    assert (first.number, second.number) == (USR1, USR1)


def test_what_is_ignored_stays_so_once_nobody_listens() -> None:
    signal.signal(USR1, signal.SIG_IGN)
    flag = SignalFlag([USR1])
    del flag
    signal.raise_signal(USR1)


def test_only_the_main_thread_can_listen() -> None:
    errors = []

    def listen() -> None:
        try:
            SignalFlag([USR1])
        except RuntimeError as error:
            errors.append(str(error))
        SignalFlag([])  # to nothing

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]


def test_a_handler_outside_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(USR1)
    monkeypatch.setattr(signal_flag.signal, "getsignal", lambda number: None)
    with pytest.warns(RuntimeWarning, match="SIGUSR1 is handled outside Python"):
        flag = SignalFlag([USR1])
    monkeypatch.undo()
    assert signal.getsignal(USR1) is before
    assert flag.number == 0


@pytest.mark.parametrize("handled_by", ["Python", "Interrupts"])
def test_ctrl_c_raises_nothing_while_somebody_listens(handled_by: str) -> None:
    program = """
from mpistrat.liveness.ending.interrupts import Interrupts
ours = Interrupts() if "WHAT" == "Interrupts" else None
flag = SignalFlag([2])
signal.raise_signal(2)
assert flag.number == 2
del flag
try:
    signal.raise_signal(2)
except KeyboardInterrupt:
    assert ours is None or not ours.unanswered()
    os._exit(3)
"""
    assert returncode_of(program.replace("WHAT", handled_by)) == 3


# What was started in the background of a shell inherits that SIGINT is ignored.
BEGIN = """
import os, signal
from mpistrat.fault_tolerance.signal_flag import SignalFlag
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""


def returncode_of(program: str) -> int:
    text = BEGIN + program
    return subprocess.run([sys.executable, "-c", text], cwd=TOP).returncode


def test_without_listeners_a_signal_ends_the_program_as_it_would_have() -> None:
    program = "flag = SignalFlag([15])\nsignal.raise_signal(15)\ndel flag\nsignal.raise_signal(15)"
    assert returncode_of(program) == -signal.SIGTERM


def test_a_forked_child_can_be_terminated() -> None:
    program = """
flag = SignalFlag([15])
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.write(writer, b"!")  # it has begun; earlier signals are lost in every Python
    signal.pause()
    os._exit(0)
os.read(reader, 1)
os.kill(child, 15)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 100)
"""
    assert returncode_of(program) == 100 - signal.SIGTERM


EARLY = """
from mpistrat.liveness.ending import early_signals
early_signals.keep()
signal.raise_signal(10)
"""


def test_signals_that_came_before_there_was_a_flag() -> None:
    """Of these it notes its own; others, and later ones, do at the first step what they do without it."""
    program = f"{EARLY}assert SignalFlag([10]).number == 10\nearly_signals.release()\n"
    assert returncode_of(program + "assert SignalFlag([10]).number == 0") == 0
    for later in (
        "assert SignalFlag([12]).number == 0\nearly_signals.release()",
        "flag = SignalFlag([10])\ndel flag\nsignal.raise_signal(10)",
    ):
        assert returncode_of(EARLY + later) == -USR1


def test_handlers_of_others_stay() -> None:
    program = """
import faulthandler
from mpistrat.liveness.ending import early_signals
signal.signal(10, signal.SIG_IGN)
faulthandler.register(12)
early_signals.keep()
assert signal.getsignal(10) == signal.SIG_IGN
signal.raise_signal(12)
assert faulthandler.unregister(12)
"""
    assert returncode_of(program) == 0


def test_a_signal_from_another_process_is_noted() -> None:
    flag = SignalFlag([USR1])
    subprocess.run([sys.executable, "-c", f"import os; os.kill({os.getpid()}, {int(USR1)})"])
    assert flag.number == USR1
