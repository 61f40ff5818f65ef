"""Buffers on GPUs through an MPI that takes pointers to device memory, of CUDA, ROCm, XPU or another kind.

This file imports mpi4py at its top. So it is imported on first use only: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, dtype_name, num_elements
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import KNOWN_TO_MPI, scale
from mpistrat.communicators.reduction.as_float32 import combined_as_float32
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.mpi import OPS


class DeviceAwareTransport(DeviceTransport):
    """Moves buffers on GPUs by handing MPI the pointers to device memory.

    MPI reads and writes the memory without regard to the program's streams. So the host waits for the current stream
    before a call. A collective returns when MPI is done, so work that the program submits later, on any stream, finds
    the result.
    """

    host: Router  # its MPI communicator also carries the device buffers; no other call uses it meanwhile

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        name = dtype_name(buffer)
        if combined_as_float32(buffer, reduction, self._combine):
            return
        if name not in KNOWN_TO_MPI:
            self.combine_on_host(buffer, reduction)
            return
        self.wait_for_current_stream(buffer)
        datatype = MPI.Datatype.fromcode(np.dtype(name).char)
        memory = self._memory(buffer, num_elements(buffer), datatype)
        self.host.mpi.comm.Allreduce(MPI.IN_PLACE, memory, OPS[reduction.op])
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        self.wait_for_current_stream(buffer)
        memory = self._memory(buffer, int(buffer.nbytes), MPI.BYTE)
        self.host.mpi.comm.Bcast(memory, root)

    def _memory(self, buffer: Array, count: int, datatype: MPI.Datatype) -> Any:
        address = self.library(buffer).pointer(buffer)
        return [MPI.buffer.fromaddress(address, int(buffer.nbytes)), count, datatype]
