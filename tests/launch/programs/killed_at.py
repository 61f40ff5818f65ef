"""A rank that dies by SIGKILL at a given moment of a program's life: `killed_at.py MOMENT RANK`, on every rank."""

import atexit
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

moment, victim = sys.argv[1], int(sys.argv[2])
rank = next(
    int(os.environ[name])
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "FORKED_RANK")
    if name in os.environ
)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def at(this: str) -> None:
    """The program has come to this moment."""
    if moment == this and rank == victim:
        die()


# Moments inside of mpistrat: when it first calls this function
CALLS = {
    "resolver": ("cluster_resolver/mpi.py", "start_mpi"),
    "init": ("liveness/ending/start_deadline.py", "init_deadline"),
    "topology": ("topology.py", "from_lowest_ranks"),
    "job_end": ("liveness/ending/job_end.py", "__init__"),
    "communicator": ("communicators/construction.py", "communicator_for"),
    "records": ("liveness/observer/node_records.py", "watch_of"),
    "window": ("communicators/node/blocks.py", "__init__"),
}


def look(frame: FrameType, event: str, _: Any) -> None:
    file, function = CALLS[moment]
    code = frame.f_code
    if event == "call" and code.co_name == function and code.co_filename.endswith(file):
        die()


class Last:
    """Dies in the interpreter's shutdown, when modules are emptied."""

    def __del__(self) -> None:
        at("shutdown")


atexit.register(at, "atexit")  # it is called after mpistrat's
last = Last()
import mpistrat as ms  # noqa: E402

at("import")
if moment in CALLS and rank == victim:
    sys.setprofile(look)
import numpy as np  # noqa: E402

strategy = ms.MultiWorkerMirroredStrategy()
at("strategy")
with strategy.scope():
    at("scope")
    variable = ms.Variable(1.0)
at("variable")
for _ in range(3):
    total = strategy.reduce("SUM", np.ones(1 << 16, np.float32), axis=None)
at("last collective")
del variable
del strategy
at("end of strategy")
from mpi4py import MPI  # noqa: E402

if moment == "finalize":
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: at("finalize")), 1)
    MPI.Finalize()
if moment == "after finalize":
    MPI.Finalize()
    at("after finalize")
atexit.register(at, "before atexit")
