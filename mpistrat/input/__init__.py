"""Input: what each replica reads."""

from mpistrat.input.datasets import BatchedDataset, FileDataset
from mpistrat.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpistrat.input.element_spec import ArraySpec, PerReplicaSpec
from mpistrat.input.input_context import InputContext, ValueContext

__all__ = [
    "ArraySpec",
    "BatchedDataset",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputContext",
    "PerReplicaSpec",
    "ValueContext",
]


def __dir__() -> list[str]:
    return __all__
