"""Where words go, in whatever state the streams of a process are. Each case is a fork, with a pipe as its stderr."""

import contextlib
import io
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.machine.notices import ranks_in_words, say, tell

WORDS = "mpistrat: words\n"


def said_by(child: Callable[[], object]) -> tuple[str, int]:
    """What comes out of descriptor 2 of a process that calls `child`, and how often it returned True."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        with contextlib.suppress(BaseException):
            os.dup2(writer, 2)
            os.close(writer)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            code = int(bool(child()))
        os._exit(code)
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def no_stream() -> None:
    sys.stderr = None  # type: ignore[assignment]


def closed_stream() -> None:
    sys.stderr.close()


def stream_in_memory() -> None:
    sys.stderr = io.StringIO()


def captured_stream() -> None:
    """As by `pytest --capture=sys`."""
    sys.stderr = io.TextIOWrapper(io.BytesIO(), write_through=True)


def full_stream() -> None:
    sys.stderr = open("/dev/full", "w")  # noqa: SIM115


def object_that_fails() -> None:
    class Stream:
        def write(self, text: str) -> None:
            raise RuntimeError(text)

    sys.stderr = Stream()  # type: ignore[assignment]


def stream_of_the_program() -> None:
    """As programs have it that keep a copy of their output."""

    class Stream:
        def write(self, text: str) -> None:
            os.write(2, text.encode())

        def flush(self) -> None:
            pass

    sys.stderr = Stream()  # type: ignore[assignment]


STATES = [no_stream, closed_stream, stream_in_memory, captured_stream]
STATES += [full_stream, object_that_fails, stream_of_the_program]


@pytest.mark.parametrize("state", [lambda: None, *STATES])
def test_the_last_words_come_out_once(state: Callable[[], None]) -> None:
    def child() -> bool:
        state()
        return say(WORDS, last=True)

    assert said_by(child) == (WORDS, 1)


def test_a_stream_in_memory_takes_other_words() -> None:
    def child() -> bool:
        stream_in_memory()
        stream = sys.stderr
        return say(WORDS) and stream.getvalue() == WORDS  # type: ignore[attr-defined]

    assert said_by(child) == ("", 1)


@pytest.mark.parametrize("stream", [no_stream, full_stream, lambda: None])
def test_a_descriptor_2_that_is_closed_or_another_s(
    stream: Callable[[], None], tmp_path: Path
) -> None:
    """Words do not go into a file that the program opened after it had closed descriptor 2."""

    def child(opens: bool) -> bool:
        stream()
        os.close(2)
        if opens and os.open(tmp_path / "data", os.O_WRONLY | os.O_CREAT) != 2:
            return True
        return say(WORDS, last=True)

    for opens in (False, True):
        assert said_by(lambda opens=opens: child(opens)) == ("", 0)
    assert (tmp_path / "data").read_text() == ""


@pytest.mark.parametrize("full", [False, True])
def test_what_pytest_captures_is_passed_over_at_the_end(full: bool) -> None:
    """A file without a name, which nobody can read when the process is gone; or one that is full."""

    def child() -> bool:
        file = open("/dev/full", "w") if full else tempfile.TemporaryFile("w")  # noqa: SIM115
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        return say(WORDS, last=True) or (not full and not say(WORDS))

    assert said_by(child) == ("", 0)


def test_a_full_pipe_that_nobody_reads() -> None:
    """Nothing waits for its reader for long, where the pipe itself does not block."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        os.set_blocking(2, False)
        os._exit(int(say("x" * 1_000_000, last=True)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


def tell_both() -> bool:
    tell("goes on", "INFO")
    tell("is wrong: 100 %")
    return True


def configure_nothing() -> None:
    pass


def configure_root() -> None:
    logging.basicConfig(level=logging.INFO)


def configure_root_late() -> None:
    tell("before", "INFO")
    logging.basicConfig(level=logging.INFO)


def configure_root_for_warnings() -> None:
    logging.basicConfig(format="%(filename)s %(message)s")


def warn_as_a_library() -> None:
    """As torch_xla does: it gives the root logger a handler, and nobody has chosen a level."""
    logging.debug("of a library")


def configure_ours() -> None:
    logger, handler = logging.getLogger("mpistrat"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s of ours: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def want_only_warnings() -> None:
    logging.getLogger("mpistrat").setLevel(logging.WARNING)


def want_nothing() -> None:
    logging.disable()


BY_DEFAULT = "mpistrat: goes on\nmpistrat: is wrong: 100 %\n"
AS_CONFIGURED = "INFO:mpistrat:goes on\nWARNING:mpistrat:is wrong: 100 %\n"


@pytest.mark.parametrize(
    ("configure", "expected"),
    [
        (configure_nothing, BY_DEFAULT),
        (closed_stream, BY_DEFAULT),
        (configure_root, AS_CONFIGURED),
        (configure_root_late, f"mpistrat: before\n{AS_CONFIGURED}"),
        (configure_root_for_warnings, "test_notices.py is wrong: 100 %\n"),
        (warn_as_a_library, BY_DEFAULT),
        (configure_ours, "INFO of ours: goes on\nWARNING of ours: is wrong: 100 %\n"),
        (want_only_warnings, "mpistrat: is wrong: 100 %\n"),
        (want_nothing, ""),
    ],
)
def test_notices_go_where_the_program_says(configure: Callable[[], None], expected: str) -> None:
    def child() -> bool:
        configure()
        return tell_both()

    assert said_by(child) == (expected, 1)


def test_last_words_wait_for_no_lock_of_logging() -> None:
    """A thread that another rank's end has stopped may hold one for ever."""

    def child() -> bool:
        configure_root()
        threading.Thread(target=logging.getLogger().handlers[0].acquire, daemon=True).start()
        return say(WORDS, last=True)

    assert said_by(child) == (WORDS, 1)


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([7, 0, 1, 2]) == "ranks 0-2, 7"
