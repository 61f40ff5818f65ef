"""Input: what each replica reads."""

from mpistrat.input.distributed_dataset import DistributedDataset as DistributedDataset
from mpistrat.input.input_context import InputContext as InputContext
from mpistrat.input.input_context import ValueContext as ValueContext
