"""Input: what each replica reads."""

from mpistrat.input.datasets import BatchedDataset as BatchedDataset
from mpistrat.input.datasets import FileDataset as FileDataset
from mpistrat.input.distributed_dataset import DistributedDataset as DistributedDataset
from mpistrat.input.distributed_iterator import DistributedIterator as DistributedIterator
from mpistrat.input.element_spec import ArraySpec as ArraySpec
from mpistrat.input.element_spec import PerReplicaSpec as PerReplicaSpec
from mpistrat.input.input_context import InputContext as InputContext
from mpistrat.input.input_context import ValueContext as ValueContext
