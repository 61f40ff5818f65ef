"""What `torch.compile` leaves alone, where Dynamo was loaded before mpistrat; in tests/mpi it comes later."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
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


def test_a_function_that_is_not_compiled() -> None:
    top = Path(__file__).parents[3]
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
