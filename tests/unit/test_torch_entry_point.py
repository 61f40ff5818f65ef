"""The backend "mpistrat" is known to torch without an import in the program, at hardly any cost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

TOP = Path(__file__).parents[2]
MILLISECONDS = 2.0


def run(program: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TOP,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "mpistrat:" not in result.stderr, result.stderr
    return result.stdout


# The entry point again, in a torch that has not seen it: other programs' time is not in CPU seconds of the thread.
COST = """
import json, sys, time, torch
before = set(sys.modules)
import torch.distributed as dist
dist.Backend.backend_list.remove("mpistrat")
dist.rendezvous.__globals__["_rendezvous_handlers"].pop("mpi")
sys.modules.pop("mpistrat_torch")
started = time.thread_time()
import mpistrat_torch
try:
    mpistrat_torch.register()
except BaseException as error:
    sys.exit(f"register raised {error!r}")
print(json.dumps([1000 * (time.thread_time() - started), sorted(before)]))
"""


def test_the_entry_point_costs_import_torch_next_to_nothing() -> None:
    costs = []
    for _ in range(3):
        milliseconds, modules = json.loads(run(COST, MPI4PY_LIBMPI="/nowhere/libmpi.so"))
        assert [name for name in ("mpi4py", "mpistrat") if name in modules] == []
        costs.append(milliseconds)
        if milliseconds <= MILLISECONDS:
            break
    assert min(costs) <= MILLISECONDS, costs


def test_an_entry_point_that_fails_says_so_and_raises_nothing() -> None:
    program = """
import contextlib, io, torch
dist = torch.distributed
dist.Backend.backend_list.remove("mpistrat")
dist.Backend.register_backend = lambda *a, **k: 1 / 0
import mpistrat_torch
with contextlib.redirect_stderr(io.StringIO()) as said:
    mpistrat_torch.register()
print(said.getvalue())
"""
    assert "does not know the backend 'mpistrat': ZeroDivisionError" in run(program)


ALONE = """
import sys
sys.modules["mpi4py.MPI"] = None  # a machine may have an MPI of its own
import torch, torch.distributed as dist
dist.init_process_group("mpistrat", init_method="mpi://")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "mpistrat")
ones = torch.ones(2, 2).t()
for work in (dist.all_reduce(ones, async_op=True), dist.broadcast(ones, 0, async_op=True)):
    work.wait()
parts = [torch.empty(2, 2)]
dist.all_gather(parts, ones)
objects = [None]
dist.all_gather_object(objects, "x")
dist.barrier()
group = dist.new_group([0])
dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4), group=group)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(parts[0]).sum().backward()
try:
    group.send([ones], 0)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
print(objects, parts[0].tolist())
"""


def test_one_rank_without_mpi() -> None:
    said = run(ALONE).splitlines()
    assert said[0] == "a group of one rank has nobody to send to, or to receive from"
    assert said[1] == "['x'] [[1.0, 1.0], [1.0, 1.0]]"
