"""Input: how each replica gets its batches."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.input.datasets import BatchedDataset, FileDataset
    from mpistrat.input.distributed_dataset import DistributedDataset, DistributedIterator
    from mpistrat.input.element_spec import ArraySpec, PerReplicaSpec
    from mpistrat.input.input_context import InputContext, ValueContext
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

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
