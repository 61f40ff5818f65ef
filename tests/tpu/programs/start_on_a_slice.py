"""Makes a TPUStrategy on hosts that say they belong to a TPU slice, and tells what PJRT was told before its first use.

There is no TPU, so PJRT fails then: what the strategy raises is told, too. A line of JSON for each rank.
"""

import json
import os
import sys

from mpi4py import MPI

import mpistrat as ms

try:
    ms.TPUStrategy()
except Exception as error:
    message = f"{type(error).__name__}: {error}"
else:
    message = "no error"
ours = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("TPU_", "PJRT_", "CLOUD_TPU"))
}
sys.stdout.write(json.dumps([MPI.COMM_WORLD.rank, message, ours]) + "\n")
