"""The names that `tf.distribute.experimental.partitioners` keeps."""

from mpistrat.variables.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from mpistrat.variables.partitioners import MaxSizePartitioner as MaxSizePartitioner
from mpistrat.variables.partitioners import MinSizePartitioner as MinSizePartitioner
from mpistrat.variables.partitioners import Partitioner as Partitioner
