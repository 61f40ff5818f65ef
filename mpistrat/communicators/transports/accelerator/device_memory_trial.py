"""A program of two MPI processes that send each other an accelerator's memory. `device_memory_proof` starts it.

It may crash or hang, because MPI may read the pointers as pointers to host memory. Its arguments are:

1. the library of arrays: "torch" or "cupy";
2. the accelerator's number;
3. the seconds until the program ends itself;
4. the seconds to wait after an error, so that the launcher can read the error;
5. a text to print when the two processes have met;
6. a text to print when all has gone well;
7. the beginning of the error if the program can use no accelerator.
"""

import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

# Elements of 4 bytes. MPI sends the short message at once (eager); for the long one both sides meet first (rendezvous).
LENGTHS = (256, 1 << 21)

# Three functions: copy a host array to the accelerator, return an array's address, wait for the accelerator.
_Library = tuple[Callable[[np.ndarray], Any], Callable[[Any], int], Callable[[], None]]


def main() -> None:
    library, number, seconds, _, met, proven, unusable = sys.argv[1:]
    signal.alarm(int(seconds))  # ends the process even while it waits in MPI
    world = MPI.COMM_WORLD
    if world.size != 2:
        raise RuntimeError(f"this is an MPI job of {world.size} processes, not of 2")
    print(met, flush=True)
    try:
        array, pointer, wait = _torch(number) if library == "torch" else _cupy(number)
        array(np.zeros(1))  # a GPU in exclusive mode refuses this process here
    except Exception as error:
        raise RuntimeError(f"{unusable}: {error}") from None
    for length in LENGTHS:
        values = np.arange(length, dtype=np.float32) % 1000

        def memory(buffer: Any, datatype: Any = MPI.FLOAT, length: int = length) -> list[Any]:
            return [MPI.buffer.fromaddress(pointer(buffer), 4 * length), length, datatype]

        for sender in (0, 1):
            sends = world.rank == sender
            buffer = array(values + 1 if sends else 0 * values)  # zeros where they are received
            wait()
            if sends:
                world.Send(memory(buffer), 1 - sender)
            else:
                world.Recv(memory(buffer), sender)
            _check(buffer, values + 1)
            buffer = array(values + 2 if sends else 0 * values)
            wait()
            world.Bcast(memory(buffer, MPI.INT), sender)
            _check(buffer, values + 2)
        buffer = array(values + world.rank)
        wait()
        world.Allreduce(MPI.IN_PLACE, memory(buffer), MPI.SUM)
        _check(buffer, 2 * values + 1)
    world.Barrier()
    print(proven, flush=True)


def _check(buffer: Any, expected: np.ndarray) -> None:
    found = buffer.get() if hasattr(buffer, "get") else buffer.cpu().numpy()
    if not np.array_equal(found, expected):
        raise RuntimeError(
            f"{np.count_nonzero(found != expected)} of {len(found)} elements are wrong"
        )


def _torch(number: str) -> _Library:
    import torch

    index = _index(number, torch.accelerator.device_count())
    torch.accelerator.set_device_index(index)
    device = torch.accelerator.current_accelerator()

    def array(values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(device)

    return array, torch.Tensor.data_ptr, torch.accelerator.synchronize


def _cupy(number: str) -> _Library:
    import cupy

    device = cupy.cuda.Device(_index(number, cupy.cuda.runtime.getDeviceCount()))
    device.use()

    def pointer(buffer: Any) -> int:
        return buffer.data.ptr

    return cupy.asarray, pointer, device.synchronize


def _index(number: str, count: int) -> int:
    """Return the accelerator's number in this process: `number`, or the next one on the second process if there are
    several.

    Raises: RuntimeError if there is none.
    """
    if not count:
        raise RuntimeError("none is visible")
    return (int(number) + MPI.COMM_WORLD.rank) % count


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.stderr.write(traceback.format_exc())
        time.sleep(float(sys.argv[4]))
        MPI.COMM_WORLD.Abort(1)  # the other process would wait for this one
