"""`torch.compile` where Dynamo was loaded, and has compiled, before mpistrat; in tests/mpi it comes later."""

import subprocess
import sys
from pathlib import Path

LEFT_ALONE = """
import torch._dynamo
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


def test_a_function_that_is_not_compiled() -> None:
    run(LEFT_ALONE)


def test_no_gradient_of_an_earlier_graph_goes_unreduced() -> None:
    run(COMPILED_BEFORE)
