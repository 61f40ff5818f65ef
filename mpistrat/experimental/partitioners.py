"""The names that `tf.distribute.experimental.partitioners` keeps."""

from mpistrat.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from mpistrat.partitioners import MaxSizePartitioner as MaxSizePartitioner
from mpistrat.partitioners import MinSizePartitioner as MinSizePartitioner
from mpistrat.partitioners import Partitioner as Partitioner
