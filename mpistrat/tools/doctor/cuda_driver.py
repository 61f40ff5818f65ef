"""Ask CUDA's driver for the GPUs that CUDA_VISIBLE_DEVICES and control groups leave to a rank.

`python -m mpistrat.tools.doctor.cuda_driver` prints them as JSON. A process of its own asks, because a driver may
crash, hang, or take memory. It needs no tool of NVIDIA's. Calls and error numbers are from <cuda.h>.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from typing import Any

from mpistrat.tools.doctor.children import ask
from mpistrat.tools.doctor.facts import Driver

LIBRARY = "libcuda.so.1"  # comes with the driver, not with CUDA
SECONDS_TO_ASK = 20.0  # ranks of other nodes wait in MPI_Init meanwhile
BEGIN = '{"installed": '  # the start of the line that the child writes

_SUCCESS = 0
_STUB_LIBRARY = 34  # the library is for linking only: there is no driver
_NO_DEVICE = 100


def look() -> Driver:
    """Return the facts about CUDA's driver, asked by a child process for 20 s at most. Raises no error.

    If the child fails, the result has an `error`; `hangs` is True if it did not end in time.
    """
    command = [sys.executable, "-m", "mpistrat.tools.doctor.cuda_driver"]
    answer = ask(command, SECONDS_TO_ASK)
    found = answer.json(BEGIN)
    if found is None:
        # The driver need not be at fault: the child may have ended before it asked.
        why = answer.failure("it tells nothing")
        return Driver(True, error=f"the question to CUDA's driver failed: {why}", hangs=answer.late)
    return Driver(**found)


def driver_of(library: Any) -> Driver:
    """Ask the loaded driver library for its GPUs. Called by: the child process.

    Returns: a `Driver` with the GPUs; with none if the driver has none; not `installed` if the library is a stub for
        linking; for another error of CUDA's, the error in words.
    """
    try:
        _call(library.cuInit, 0)
        number = ctypes.c_int()
        _call(library.cuDeviceGetCount, ctypes.byref(number))
        return Driver(True, [_name(library, index) for index in range(number.value)])
    except _CudaError as error:
        code = error.args[0]
        if code == _NO_DEVICE:
            return Driver(True)
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        words = (text.value or b"unknown").decode(errors="replace")
        return Driver(code != _STUB_LIBRARY, error=f"CUDA error {code} ({words})")


def _name(library: Any, index: int) -> str:
    """Return the UUID of GPU number `index` in hexadecimal; of its slice if the GPU is divided (MIG)."""
    device = ctypes.c_int()
    uuid = (ctypes.c_ubyte * 16)()
    _call(library.cuDeviceGet, ctypes.byref(device), index)
    # Drivers before CUDA 11.4 have no version 2.
    name_of = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    _call(name_of, ctypes.byref(uuid), device)
    return bytes(uuid).hex()


class _CudaError(Exception):
    """CUDA has returned an error. The argument is its number."""


def _call(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code != _SUCCESS:
        raise _CudaError(code)


def main() -> None:
    try:
        driver = driver_of(ctypes.CDLL(LIBRARY))
    except OSError as error:  # there is no libcuda
        driver = Driver(False, error=str(error))
    print(json.dumps(dataclasses.asdict(driver)))


if __name__ == "__main__":
    main()
