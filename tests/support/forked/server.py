"""`python server.py CONTROL MODULE…`: imports torch, mpistrat and the modules, and forks a daemon for each job that it
is asked for.

torch imports `torch._dynamo`, which takes 1.4 s, when a program makes its first optimizer: so does the server.

CONTROL is the descriptor of a socket. Each request over it is the address that a job's daemon listens at, and comes
with a descriptor of that job, which is closed when the job is over. The server ends when CONTROL is closed.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
# A name of MPI's own daemons: the ranks' nearest ancestor of such a name tells which job they are of.
_NAME_OF_A_DAEMON = b"hydra_pmi_proxy"
# The slow part of importing torch_xla. torch_xla itself is each program's to import: it reads the environment then.
_FOR_TORCH_XLA = (
    "functorch.compile",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.lowering",
    "torch.export",
)
_prctl = ctypes.CDLL(None).prctl

Request = dict[str, Any]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = str(Path(__file__).parents[2])
    from support import torchvision_operators

    torchvision_operators.declare_when_imported()
    sys.path.pop(0)  # that folder is none of the program's
    import mpi4py  # noqa: F401 (not MPI: its library is each job's own)
    import numpy as np
    import torch

    import mpistrat  # noqa: F401

    for_torch_xla = _FOR_TORCH_XLA if importlib.util.find_spec("torch_xla") else ()
    for name in ("torch._dynamo", *for_torch_xla, *sys.argv[2:]):
        importlib.import_module(name)

    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked safely"
    gc.freeze()  # a fork's garbage collection, such as that at its end, would copy what it looks at
    control.sendall(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for daemons
    while True:
        address, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not address:
            return
        if os.fork() == 0:
            control.close()
            request = _serve(address.decode(), socket.socket(fileno=descriptors[0]))
            # Each process has random numbers of its own, by Python's module by itself.
            np.random.seed()
            torch.default_generator.seed()
            _run(request["program"])
            return
        os.close(descriptors[0])


def _serve(address: str, job: socket.socket) -> Request:
    """The daemon of a job: forks ranks until the job is over, then ends. Returns in each rank, with its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_PR_SET_NAME, _NAME_OF_A_DAEMON)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    job.sendall(b"ready")
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(job, selectors.EVENT_READ)
    ranks: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                received = _receive(connection)
                if received is None:
                    connection.close()
                    continue
                request, files = received
                rank = os.fork()
                if rank == 0:
                    selector.close()
                    for other in (listener, job, connection, *ranks):
                        other.close()
                    _become(request, files)
                    return request
                for file in files:
                    os.close(file)
                _tell(connection, rank)
                ranks[connection] = rank
                selector.register(connection, selectors.EVENT_READ, connection)
                selector.register(os.pidfd_open(rank), selectors.EVENT_READ, connection)
            elif key.fileobj is job:  # it is over
                for rank in ranks.values():
                    os.kill(rank, signal.SIGKILL)
                    os.waitpid(rank, 0)
                times = os.times()
                job.sendall(json.dumps(times.children_user + times.children_system).encode())
                os._exit(0)
            elif isinstance(key.fileobj, int):  # a rank has ended
                connection = key.data
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                _, status = os.waitpid(ranks.pop(connection), 0)
                if connection in selector.get_map():
                    selector.unregister(connection)
                    _tell(connection, status)
                connection.close()
            else:  # its place was killed: so is the rank
                selector.unregister(key.fileobj)
                os.kill(ranks[key.data], signal.SIGKILL)


def _tell(connection: socket.socket, number: int) -> None:
    # Its place may have been killed meanwhile, which the selector tells next.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(number.to_bytes(8, "little"))


def _receive(connection: socket.socket) -> tuple[Request, list[int]] | None:
    """A request and its open files; None if who asked was killed meanwhile."""
    head, files, _, _ = socket.recv_fds(connection, 8, 8)
    missing = int.from_bytes(head, "little")
    text = b""
    while missing and (more := connection.recv(missing)):
        text += more
        missing -= len(more)
    if missing or not text:
        for file in files:
            os.close(file)
        return None
    return json.loads(text), list(files)


def _become(request: Request, files: list[int]) -> None:
    """This process is the rank: its open files, its environment, its name."""
    _prctl(_PR_SET_NAME, b"python")
    wanted = request["files"]
    # Above all numbers that are wanted, so that none is overwritten before it is copied.
    high = [os.dup(file) for file in files]
    while min(high) <= max(wanted):
        high = [os.dup(file) for file in high]
    for file, number in zip(high, wanted, strict=True):
        os.dup2(file, number)
    highest = max([*high, *files])
    os.closerange(max(wanted) + 1, highest + 1)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = os.environ.get("FORKED_PYTHON", sys.executable)  # of its own children
    os.chdir(request["folder"])


def _run(program: list[str]) -> None:
    """As `python program…` does."""
    if program[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *program[2:]]
        _run_as_main(program[1], "<string>")
    elif program[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        file_name = os.path.abspath(program[0])
        sys.path.insert(0, os.path.dirname(file_name))
        sys.argv = program
        with open(program[0], encoding="utf-8") as file:
            text = file.read()
        _run_as_main(text, program[0], __file__=program[0])


def _run_as_main(text: str, name: str, **attributes: str) -> None:
    module = types.ModuleType("__main__")
    module.__dict__.update(attributes, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(text, name, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
