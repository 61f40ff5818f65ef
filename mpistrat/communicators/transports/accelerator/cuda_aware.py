"""Buffers on GPUs through an MPI that takes pointers to device memory.

No library says reliably whether it does: Open MPI 5 repeats what it was asked for, MPICH lists a setting that its build
cannot use, and a wrong guess is a segmentation fault. So a child process tries.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, dtype_name, num_elements
from mpistrat.communicators.arithmetic import KNOWN_TO_MPI, scale
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.mpi import OPS
from mpistrat.liveness.watch import CommunicatorWatch

SECONDS_TO_TRY = 90.0  # importing torch and starting CUDA take their time
PROVEN = "mpistrat: device memory went through MPI"

# An MPI job of its own, of one rank: argv is the library of arrays and the GPU's number.
TRY = f"""
import sys
from mpi4py import MPI
library, index = sys.argv[1], int(sys.argv[2])
if library == "torch":
    import torch
    make = lambda value: torch.full((1,), value, dtype=torch.float32, device=f"cuda:{{index}}")
    pointer, wait = torch.Tensor.data_ptr, lambda: torch.cuda.synchronize(index)
else:
    import cupy
    cupy.cuda.Device(index).use()
    make = lambda value: cupy.full((1,), value, cupy.float32)
    pointer, wait = lambda array: array.data.ptr, lambda: cupy.cuda.Device(index).synchronize()
sent, received, total = make(42.0), make(0.0), make(0.0)
wait()
memory = lambda array: [MPI.buffer.fromaddress(pointer(array), 4), 1, MPI.FLOAT]
MPI.COMM_SELF.Sendrecv(memory(sent), 0, 0, memory(received), 0, 0)
MPI.COMM_SELF.Allreduce(memory(received), memory(total))
if float(received[0]) == float(total[0]) == 42.0:
    print({PROVEN!r})
"""


@functools.cache
def is_proven(library: str, index: int) -> bool:
    """Whether this process's MPI takes memory of GPU `index`. A child process tries it once.

    The child sends an element from the GPU's memory to itself and back into the GPU's memory. It is no rank of the job:
    the launcher's variables have left the environment. A crash, or no end within 90 s, is a no.

    Args:
        library: "torch" or "cupy", which allocates the memory.
    """
    return ends_well([sys.executable, "-c", TRY, library, str(index)], SECONDS_TO_TRY)


def ends_well(command: list[str], seconds: float) -> bool:
    """Whether `command` prints PROVEN, and ends without an error, within `seconds`."""
    try:
        tried = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0 and PROVEN in tried.stdout.splitlines()


class CudaAwareTransport(DeviceTransport):
    """Hands buffers on GPUs to MPI. MPI knows no streams, so a call begins when the GPU has done what comes before it.

    Args:
        comm: over the ranks of `host`; nobody else uses it.
    """

    def __init__(
        self,
        host: Communicator,
        index: int,
        watch: CommunicatorWatch,
        why: str,
        comm: MPI.Intracomm,
    ) -> None:
        super().__init__(host, index, watch, why)
        self._comm = comm

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        if dtype_name(buffer) not in KNOWN_TO_MPI:
            self.combine_on_host(buffer, reduction)
            return
        self.wait_for_current_stream(buffer)
        datatype = MPI.Datatype.fromcode(np.dtype(dtype_name(buffer)).char)
        memory = self._memory(buffer, num_elements(buffer), datatype)
        self._comm.Allreduce(MPI.IN_PLACE, memory, OPS[reduction.op])
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        self.wait_for_current_stream(buffer)
        self._comm.Bcast(self._memory(buffer, int(buffer.nbytes), MPI.BYTE), root)

    def _memory(self, buffer: Array, count: int, datatype: MPI.Datatype) -> Any:
        address = self.library(buffer).pointer(buffer)
        return [MPI.buffer.fromaddress(address, int(buffer.nbytes)), count, datatype]
