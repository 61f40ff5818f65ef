"""A restart with a wire format, of ranks on two nodes that MPICH makes up: it goes on with the same bits.

Slices go between the nodes, of which each rank holds something back, and gradients leave in buckets while `backward()`
runs: so they must from the first step on.
"""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = """
import sys
import torch
import mpistrat as ms
from mpistrat.communicators.costs.measurement import Costs

# What is large goes by node, whatever that costs here: in the communicator of the buckets' thread, too.
Costs.cheaper_from = lambda costs, way, other, floor, clearly=1: floor

def training(seed):
    options = ms.CommunicationOptions(wire_format=ms.wire_formats.TopK(0.05), overlap=overlap, bytes_per_pack=1 << 18)
    strategy = ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="sum")
    communicator = strategy.extended.communicator
    torch.manual_seed(seed + communicator.rank)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.ReLU(), torch.nn.Linear(300, 400))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 400)).square().mean().backward()
        optimizer.step()

    def train(steps):
        for _ in range(steps):
            strategy.run(step)

    return strategy, model, checkpoint, train

overlap = {"overlap": True, "afterwards": False}[sys.argv[2]]
strategy, model, checkpoint, train = training(1)
communicator = strategy.extended.communicator
train(5)
held = checkpoint.objects["residuals"].rank_state_dict()["held_back"]
assert len(held) == (3 if overlap else 1), held  # all at once at first, then two buckets
whole = sum(list(model.parameters())[slot].numel() for slot in held[-1]["slots"])
assert len(held[-1]["residual"]) in ((whole,) if communicator.size == 2 else range(1, whole)), held
path = ms.checkpoint.CheckpointManager(checkpoint, sys.argv[1]).save(5)
train(5)
for keeps in (True, False):
    strategy, again, checkpoint, train = training(2)
    if not keeps:
        del checkpoint.objects["residuals"]
    ms.checkpoint.CheckpointManager(checkpoint, sys.argv[1]).restore(path)
    train(5)
    assert torch.equal(again[0].weight, model[0].weight) == keeps
if communicator.rank == 0:
    print(f"all is well; {strategy.extended.explain()}", flush=True)
"""


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("way", ["overlap", "afterwards"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_nodes(tmp_path: Path, ranks: int, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "OMP_NUM_THREADS": "1"}
    job = Launcher.named("MPICH").run_python(
        ranks,
        program,
        tmp_path / "saved",
        way,
        env=environment,
        seconds=90,
        forked=True,
    )
    assert job.returncode == 0, job.output
    assert "all is well" in job.output
