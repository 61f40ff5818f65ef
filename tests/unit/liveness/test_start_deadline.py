"""The clock that ends a start-up which some ranks never join."""

import subprocess
import sys

import pytest

from mpistrat.errors import TopologyError
from mpistrat.liveness.ending.start_deadline import init_deadline, start_deadline
from mpistrat.settings import start_seconds


@pytest.mark.parametrize(
    ("variables", "seconds"), [({}, 300), ({"MPISTRAT_START_SECONDS": "0.5"}, 0.5)]
)
def test_the_setting(variables, seconds):
    assert start_seconds(variables) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_bad_setting_is_named(text):
    with pytest.raises(TopologyError, match=f"MPISTRAT_START_SECONDS={text!r}"):
        start_seconds({"MPISTRAT_START_SECONDS": text})


@pytest.mark.parametrize("deadline", [init_deadline, lambda **who: start_deadline("a test", **who)])
@pytest.mark.parametrize(("seconds", "size"), [("30", 2), ("0", 2), ("30", 1)])
def test_a_block_that_ends_in_time_goes_on(monkeypatch, deadline, seconds, size):
    monkeypatch.setenv("MPISTRAT_START_SECONDS", seconds)
    with deadline(rank=0, size=size):
        pass
    with pytest.raises(KeyError, match="x"), deadline(rank=0, size=size):
        raise KeyError("x")


# time.sleep lets other threads run; a call through PyDLL keeps the GIL, as mpi4py's MPI_Init does
@pytest.mark.parametrize(
    ("block", "what"),
    [
        (
            "with start_deadline('the first barrier', rank=1, size=4): time.sleep(60)",
            "the first barrier",
        ),
        ("with init_deadline(rank=1, size=4): ctypes.PyDLL(None).sleep(60)", "MPI_Init"),
    ],
)
def test_a_block_that_takes_too_long_ends_the_process_with_a_message(monkeypatch, block, what):
    monkeypatch.setenv("MPISTRAT_START_SECONDS", "0.3")
    program = "import ctypes, time\nfrom mpistrat.liveness.ending.start_deadline import *\n" + block
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert (
        f"rank 1 waited 0.3 s in {what} for the other ranks: some of the 4 started processes"
        in done.stderr
    )
    assert "It waits at <string>:3 in <module>.\n" in done.stderr
