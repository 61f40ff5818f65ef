"""What `torch.compile` leaves alone: where a program communicates it runs as it is written.

Dynamo would else read our functions down to MPI.
"""

from __future__ import annotations

from mpistrat.replicas.losses import choose_sum
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.torch_distributed.compilation import not_compiled, when_dynamo_loads
from mpistrat.variables.variable import Variable

__all__ = ["not_compiled", "when_dynamo_loads"]

for _function in (ReplicaContext.merge_call, ReplicaContext.all_reduce, ReplicaContext.all_gather):
    not_compiled(_function)
for _name, _method in vars(Variable).items():
    if _name.startswith(("assign", "scatter_")):
        not_compiled(_method)
# As torch.compiler.assume_constant_result() does: it is called when it is compiled, and not again.
vars(choose_sum).update(_dynamo_marked_constant=True)
