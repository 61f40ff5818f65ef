"""`torch.compile` where Dynamo is loaded, or has compiled, before mpistrat, and after; tests/mpi has what is equal."""

import subprocess
import sys
from pathlib import Path

import pytest

DYNAMO_FIRST = "import torch._dynamo\n"
# Somebody only asks whether there is a Dynamo.
ASKED_FOR = """
import importlib.util, sys, torch
import mpistrat.pytorch.compilation
assert "torch._dynamo" not in sys.modules
assert importlib.util.find_spec("torch._dynamo")
"""
LEFT_ALONE = """
from mpistrat.pytorch.compilation import not_compiled

def below(x):
    return x + 1

@not_compiled
def left_alone(x):
    return below(x)

def program(x):
    return left_alone(x * 2) * 3

graphs = []
def backend(graph, inputs):
    graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

assert torch.compile(program, backend=backend)(torch.ones(())) == 9
assert graphs == [["mul"], ["mul"]], graphs
torch._dynamo.reset()
try:
    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(()))
except torch._dynamo.exc.Unsupported as error:
    assert "mpistrat communicates here" in str(error), error
else:
    raise AssertionError("no break")
"""

# One graph of a loss for strategies that come one after another.
COMPILED_LOSS = """
import torch
import mpistrat as ms

@torch.compile(backend="eager", fullgraph=True)
def loss_of(outputs):
    return ms.compute_average_loss(outputs.square(), global_batch_size=4)

for _ in range(2):
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    for _ in range(2):
        strategy.run(lambda: loss_of(model(torch.ones(2, 1)).sum(1)).backward())
    assert "the sum of gradients, decided by compute_average_loss" in strategy.extended.explain()
"""

# Two graphs of a loss, one for the first size and one for all others, whatever the sizes of steps.
LOSS_OF_ANY_STEP = """
import torch
import mpistrat as ms

graphs = []

def count(graph, _):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=count, fullgraph=True)
def loss_of(outputs):
    return ms.compute_average_loss(outputs.square())

strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
x = torch.arange(40.0)
for size in (8, 9, 13, 7):
    batches = [x[:size], x[:size - 3], x]
    for whole, part in zip(batches, strategy.experimental_distribute_dataset(batches)):
        loss = strategy.reduce("sum", strategy.run(loss_of, (part,)), axis=None)
        torch.testing.assert_close(loss, whole.square().mean())
assert len(graphs) == 2, len(graphs)
"""

# A graph that writes gradients itself, of a model that is mirrored later.
COMPILED_BEFORE = """
import torch
torch._dynamo.config.trace_autograd_ops = True
model = torch.nn.Linear(1, 1)

@torch.compile(backend="eager")
def backward(x):
    model(x).sum().backward()

backward(torch.ones(1, 1))
model.zero_grad()
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")
strategy.mirror(model)
strategy.run(lambda: backward(torch.full((1, 1), ms.get_replica_context().replica_id_in_sync_group + 1.0)))
assert model.weight.grad.item() == 1 + 2
"""


def run(program: str) -> None:
    top = Path(__file__).parents[3]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", [DYNAMO_FIRST, ASKED_FOR])
def test_a_function_that_is_not_compiled(before: str) -> None:
    run(before + LEFT_ALONE)


def test_each_strategy_learns_what_its_loss_asks_for() -> None:
    run(COMPILED_LOSS)


def test_a_loss_is_compiled_once_for_steps_of_all_sizes() -> None:
    run(LOSS_OF_ANY_STEP)


def test_no_gradient_of_an_earlier_graph_goes_unreduced() -> None:
    run(COMPILED_BEFORE)
