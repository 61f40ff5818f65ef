"""Try whether MPI takes pointers to an accelerator's memory.

No library tells this reliably. Open MPI 5 only repeats its configuration, and MPICH may list a setting that its build
cannot use. A wrong guess is a segmentation fault, or a wrong sum. So two child processes try it as an MPI job of their
own, and this rank only looks at how they end. If no two processes can be started, the answer is no, because a process
that sends to itself does not prove that it can send to others.

This file imports mpi4py at its top. So it is imported on first use only: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

from mpistrat.cluster_resolver.mpi import library_path
from mpistrat.cluster_resolver.pair_of_processes import commands
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.node.shared_memory import first_failure
from mpistrat.liveness import deadlines

MET = "mpistrat: two processes"
PROVEN = "mpistrat: device memory went through MPI"
UNUSABLE = "no accelerator can be used"  # begins the error of a process that finds none
# The line in the output of a launcher or of Python that names the error.
_TELLING = re.compile(r"signal \d|[Ss]ignal: |^[\w.]*(Error|Exception)\b")
_EXCLUSIVE = ". Exclusive mode lets one process use a GPU; nvidia-smi -c DEFAULT lets several"
TRIAL = Path(__file__).with_name("device_memory_trial.py")


def why_not_proven(host: Communicator, node: int, library: str, index: int) -> str:
    """Return why MPI is not trusted with memory of the ranks' accelerators; "" if a trial showed that MPI takes it.

    Collective; the text is the same on all ranks: the reason of the lowest rank that has one. The first rank of each
    node tries within its node. If that went well, rank 0 also tries between its node and the next node.

    Args:
        host: the communicator of these ranks.
        node: the number of this rank's node.
        library: the library that allocates the memory: "torch" or "cupy".
        index: the number of this rank's accelerator in this process.
    """
    places = host.all_gather_object((node, MPI.Get_processor_name()))
    nodes, names = zip(*places, strict=True)
    first_ranks = sorted({nodes.index(number) for number in nodes})  # one on each node
    reason = ""
    if host.rank in first_ranks:
        reason = reason_against(library, index)
        if host.rank == 0 and not reason and len(first_ranks) > 1:
            hosts = [names[rank] for rank in first_ranks[:2]]
            reason = reason_against(library, index, tuple(hosts))
    return first_failure(host.all_gather_object(reason and f"rank {host.rank}: {reason}"))


@functools.cache
def reason_against(library: str, index: int, hosts: tuple[str, ...] = ()) -> str:
    """Return why this process's MPI is not trusted with memory of accelerator `index`; "" if two processes sent it.

    This process starts the two as an MPI job of their own. They send each other 1 KiB and 8 MiB, and use the
    collectives of `DeviceAwareTransport`. A crash, a wrong value, or no end within 90 s gives a reason. The answer for
    the same arguments is kept. Also called by: `mpistrat doctor`.

    Args:
        library: the library that allocates the memory: "torch" or "cupy".
        index: the accelerator's number in this process.
        hosts: the host names of the two processes; empty: both run on this node.
    """
    between = f"between {' and '.join(hosts)}" if hosts else "on its node"
    limit = deadlines.RANK_WAITS_FOR_TRIAL_OF_DEVICE
    wait = str(deadlines.TRIAL_WAITS_FOR_LAUNCHER_TO_READ)
    words = [library, str(index), str(limit), wait, MET, PROVEN, UNUSABLE]
    program = [sys.executable, "-c", TRIAL.read_text(), *words]
    deadline = time.monotonic() + limit
    reason = "there is neither mpiexec nor srun"
    for command, environment in commands(MPI.Get_library_version(), library_path(), hosts):
        seconds_left = deadline - time.monotonic()
        met, failure = run([*command, *program], environment, seconds_left)
        if met:
            sent = "were to send" if UNUSABLE in failure else "sent"
            failure += _EXCLUSIVE * ("busy or unavailable" in failure)
            return failure and f"two processes {between} that {sent} device memory: {failure}"
        reason = f"{Path(command[0]).name}: {failure}"
    return f"no two processes {between} could be started, to try whether MPI takes device memory ({reason})"


def run(command: Sequence[str], environment: dict[str, str], seconds: float) -> tuple[bool, str]:
    """Run `command`, the launcher of the trial's two processes, and wait for its end.

    Each process prints MET when MPI has started with two processes, and PROVEN when all values arrived.

    Args:
        environment: all variables of the command.
        seconds: after this time the command and its children are killed.
    Returns: whether both processes printed MET, and the failure in words; "" if both printed PROVEN and the command
        ended with code 0. A command that cannot be started is a failure, too.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return False, str(error)
    failure = ""
    try:
        stdout, stderr = process.communicate(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        failure = f"no end within {deadlines.RANK_WAITS_FOR_TRIAL_OF_DEVICE} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
    # Count the words, not lines: a launcher may put the output of both processes in one line.
    if not failure and (process.returncode or stdout.count(PROVEN) != 2):
        lines = stderr.splitlines()
        telling = [line for line in lines if _TELLING.search(line)]
        failure = f"exit code {process.returncode}"
        for line in telling[:1] or lines[-1:]:
            failure += f", {line[:200]}"
    return stdout.count(MET) == 2, failure
