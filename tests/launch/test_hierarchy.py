"""Collectives over several nodes, with nodes that MPICH makes up: it deals the ranks out like cards.

Several nodes of Open MPI, and bytes on a wire, need networks of their own.
"""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

TESTS = Path(__file__).parents[1]

PROGRAM = """
import numpy as np, torch
from mpi4py import MPI
import mpistrat as ms
from mpistrat.communicators import Reduction, reducing
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.transports.hierarchical import HierarchicalTransport
from mpistrat.pytorch.gradients.wires import Wire
from mpistrat.wire_formats import ShortFloats, TopK

strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
communicator = strategy.extended.communicator
hierarchy, rank, size = communicator.transports.preferred[0], communicator.rank, communicator.size
assert isinstance(hierarchy, HierarchicalTransport)
assert hierarchy.senders == size // 2
communicator.all_reduce(np.zeros(1 << 18))  # measures, once
assert set(hierarchy.costs.routes) == {"by node", "memory", "slices between nodes", "MPI"}
if hierarchy.pipelined is not None:
    assert set(hierarchy.pipelined.costs.routes) == {"in pieces, asleep meanwhile", "MPI"}
    hierarchy.pipelined.smallest = 0
hierarchy.smallest = 0

taken = []

def seen(move):
    return lambda *call: (taken.append(1), move(*call))

moves = hierarchy.moves
hierarchy.moves = {**moves, AllReduce: seen(moves[AllReduce])}

def everyone(dtype, length):
    return [(torch.arange(length) % 7 + r).to(dtype) for r in range(size)]

for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16):
    for length in (40_000, 1_000_003):
        operands = everyone(dtype, length)
        total = sum(operands[1:], start=operands[0])
        mine = operands[rank]
        buffer = mine.clone()
        communicator.all_reduce(buffer)
        assert torch.equal(buffer, total), (dtype, length)
        out = torch.empty_like(mine)
        communicator.all_reduce(mine, "max", out=out)
        assert torch.equal(out, operands[-1])
        memory = communicator.memory.window_buffer(mine.nbytes)
        buffer = torch.from_numpy(memory).view(dtype).copy_(mine)
        communicator.all_reduce(buffer, reducing(scale=0.5 if dtype.is_floating_point else None))
        assert torch.equal(buffer, total * 0.5 if dtype.is_floating_point else total)
        buffer = mine.clone() if rank else torch.from_numpy(memory).view(dtype).copy_(mine)
        communicator.all_reduce(buffer)  # in the window on one rank only
        assert torch.equal(buffer, total)
        for root in range(size):
            buffer = mine.clone()
            communicator.broadcast(buffer, root)
            assert torch.equal(buffer, operands[root]), (dtype, length, root)
            buffer = mine.clone()
            communicator.reduce(buffer, root)
            assert torch.equal(buffer, total if rank == root else mine)
        del buffer, memory
assert len(taken) == 5 * 2 * (4 + size)

# The other calls, whose ranks send different numbers of rows: from r to s, r + 2 s times the length.
for dtype in (torch.int32, torch.bfloat16):
    for length in (1, 10_000):
        mine = torch.full((length, 3), rank, dtype=dtype)
        whole = torch.zeros(size * length, 3, dtype=dtype)
        communicator.all_gather_into(mine, whole)
        assert whole[:, 2].tolist() == [r for r in range(size) for _ in range(length)]
        communicator.reduce_scatter(whole, mine)
        assert (mine == size * rank).all()
        sent = [(rank + 2 * r) * length for r in range(size)]
        received = [(r + 2 * rank) * length for r in range(size)]
        out = torch.zeros(sum(received), 3, dtype=dtype)
        communicator.all_to_all(torch.full((sum(sent), 3), rank, dtype=dtype), out, sent, received)
        assert torch.equal(out[:, 0], torch.arange(size).repeat_interleave(torch.tensor(received)).to(dtype))
        product = torch.full((length,), 2, dtype=dtype)
        communicator.all_reduce(product, "prod")
        assert (product == 2**size).all()

# What three numbers in bfloat16 add up to is rounded once, not on each node.
short = torch.full((40_000,), 1.0 if rank == 0 else 2.0**-8 * 0.75).to(torch.bfloat16)
exact = (1.0 + (size - 1) * float(short.new_tensor(2.0**-8 * 0.75)))
communicator.all_reduce(short)
assert float(short[0]) == float(torch.tensor(exact).to(torch.bfloat16))

# Wire formats are given what this node's ranks have added up already, slice by slice.
for wire_format, most in ((ShortFloats("bfloat16"), 2.0**-7 * 7 * size), (TopK(1.0), 1e-4)):
    wire = Wire(wire_format)
    everyone_has = [torch.randn(100_001, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    buffer = everyone_has[rank].clone()
    communicator.all_reduce(buffer, Reduction(scale=0.5, compressor=wire))
    error = (buffer - 0.5 * sum(everyone_has)).abs().max()
    assert error < most, (wire_format, error)
    assert len(set(MPI.COMM_WORLD.allgather(buffer.numpy().tobytes()))) == 1
    carries = hierarchy.node.rank < hierarchy.senders
    assert abs(wire.size - (100_001 / hierarchy.senders if carries else 0)) <= 1

with strategy.scope():
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 300)
alone = torch.nn.Linear(400, 300)
alone.load_state_dict(model.state_dict())
generator = torch.Generator().manual_seed(5)
examples = torch.randn(4 * size, 400, generator=generator)
del taken[:]
strategy.run(lambda: model(examples[4 * rank : 4 * rank + 4]).square().mean().backward())
alone(examples).square().mean().backward()
torch.testing.assert_close(model.weight.grad, alone.weight.grad, rtol=1e-4, atol=1e-6)
assert taken
assert len(set(MPI.COMM_WORLD.allgather(model.weight.grad.numpy().tobytes()))) == 1

# A value's way by node is short.
from support.trips import Figures, least

del hierarchy.moves
value = np.ones(1 << 16, np.float32)
trip = strategy.run(lambda: least(lambda: ms.get_replica_context().all_reduce("sum", value)))
trip.check(Figures(120, 23))
assert f"{size} ranks on 2 nodes: by node, in {size // 2} slices between the nodes" in strategy.extended.explain()
if rank == 0:
    print("all is well", flush=True)
"""


@pytest.mark.time_limit(120)
@pytest.mark.alone(
    "Its ranks measure costs of communication, and other tests would take their cores."
)
@pytest.mark.parametrize("ranks", [3, 4])
def test_slices_go_between_the_nodes(tmp_path: Path, ranks: int) -> None:
    """Two nodes; of three ranks, one stands alone on its."""
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.append({str(TESTS)!r})\n{PROGRAM}")
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "OMP_NUM_THREADS": "1"}
    job = Launcher.named("MPICH").run_python(
        ranks, program, env=environment, seconds=90, forked=True
    )
    assert job.returncode == 0, job.output
    assert "all is well" in job.output


SHARED_PARAMETERS = """
import torch
from mpi4py import MPI
import mpistrat as ms

world = MPI.COMM_WORLD

def train(dtype, shared):
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean", shared_parameters=shared)
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(400, 300).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(world.rank)

    def backward():
        x = torch.randn(8, 400, generator=generator).to(dtype)
        model(x).square().mean().backward()

    def step():
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return model, optimizer

def files(tensor):
    with open("/proc/self/maps") as lines:
        for line in lines:
            first, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < end:
                return world.allgather(int(line.split()[4]))

for dtype in (torch.float32, torch.bfloat16):
    own, shared = train(dtype, False), train(dtype, True)
    tolerance = {"rtol": 0.02, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(list(own[0].parameters()), list(shared[0].parameters()), **tolerance)
    torch.testing.assert_close(own[1].state_dict(), shared[1].state_dict(), **tolerance)
    for tensor in (*shared[0].parameters(), *(s["momentum_buffer"] for s in shared[1].state.values())):
        assert len(set(world.allgather(tensor.detach().float().numpy().tobytes()))) == 1
        inodes = files(tensor)  # MPICH deals ranks out to the two nodes in turn
        assert inodes == [inodes[rank % 2] for rank in range(world.size)], inodes
        assert inodes[0] != inodes[1]
if world.rank == 0:
    print("all is well", flush=True)
"""


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("ranks", [3, 4])
def test_each_node_has_its_copy_of_shared_parameters(tmp_path: Path, ranks: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARED_PARAMETERS)
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "OMP_NUM_THREADS": "1"}
    job = Launcher.named("MPICH").run_python(
        ranks, program, env=environment, seconds=90, forked=True
    )
    assert job.returncode == 0, job.output
    assert "all is well" in job.output
