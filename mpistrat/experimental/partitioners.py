"""The names that `tf.distribute.experimental.partitioners` keeps."""

from mpistrat.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


def __dir__() -> list[str]:
    return __all__
