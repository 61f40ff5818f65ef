"""Marks functions of this package, on import, so that `torch.compile` leaves them out of its graphs.

Without the mark Dynamo would trace the functions down to MPI.
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
# This is the mark of torch.compiler.assume_constant_result(): Dynamo calls the function once, when it compiles.
vars(choose_sum).update(_dynamo_marked_constant=True)
