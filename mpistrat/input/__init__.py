"""Input: how each replica gets its batches."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.input.datasets import BatchedDataset as BatchedDataset
    from mpistrat.input.datasets import FileDataset as FileDataset
    from mpistrat.input.distributed_dataset import DistributedDataset as DistributedDataset
    from mpistrat.input.distributed_dataset import DistributedIterator as DistributedIterator
    from mpistrat.input.element_spec import ArraySpec as ArraySpec
    from mpistrat.input.element_spec import PerReplicaSpec as PerReplicaSpec
    from mpistrat.input.input_context import InputContext as InputContext
    from mpistrat.input.input_context import ValueContext as ValueContext
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
