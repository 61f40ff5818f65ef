"""Ends a job before this process has initialized MPI, when MPI_Abort cannot be called."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

from mpistrat.cluster_resolver.launcher import SLURM_STEP, describes_daemons

_SECONDS_TO_ANSWER = 0.5
_SECONDS_TO_BE_KILLED = 2.0


def abort_by_launcher(code: int) -> None:
    """Ask MPICH's or Slurm's launcher to end all processes of the job, and wait 2 seconds to be killed.

    Returns if this process is still alive then, and at once if there is no such launcher or the request fails; the
    caller then ends the process. Open MPI's launcher needs no request, because it ends the job when a process ends with
    an exit code other than 0. MPICH's and Slurm's launchers wait for the other processes, and these may wait for this
    process in MPI_Init.

    Called by: `rank_end`, when the job must end before MPI runs.
    Args: code: the exit code of the job. Slurm's launcher does not get it.
    """
    environ = os.environ
    asked = False
    # Set by MPICH's launcher, by launchers derived from it, and by srun --mpi=pmi2
    if environ.get("PMI_FD", "").isdecimal():
        asked = _abort_by_pmi(int(environ["PMI_FD"]), code)
    elif SLURM_STEP[0] in environ and not describes_daemons(environ):
        asked = _cancel(f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}")
    if asked:
        time.sleep(_SECONDS_TO_BE_KILLED)


def _abort_by_pmi(descriptor: int, code: int) -> bool:
    """Send the launcher a request to abort the job, in version 1 of the protocol of PMI (MPICH's process manager).

    Args:
        descriptor: number of the socket that the launcher has opened for PMI.
        code: the exit code of the job.
    Returns: whether the request was sent. False on an OSError, and if the socket's other end is not this process's
        parent.
    """
    with contextlib.suppress(OSError):
        with socket.socket(fileno=os.dup(descriptor)) as found:
            peer = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", peer)  # of the process at the other end
        if pid != os.getppid():  # the program has closed it, and reuses the number
            return False
        os.write(descriptor, b"cmd=init pmi_version=1 pmi_subversion=1\n")
        if select.select([descriptor], (), (), _SECONDS_TO_ANSWER)[0]:
            os.read(descriptor, 1024)
        os.write(descriptor, f"cmd=abort exitcode={code}\n".encode())
        return True
    return False


def _cancel(step: str) -> bool:
    import subprocess  # imported here, so that `import mpistrat` stays fast

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["scancel", step], capture_output=True, timeout=10).returncode == 0
    return False
