"""The names of `tf.distribute.experimental.partitioners`."""

from mpistrat.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


def __dir__() -> list[str]:
    return __all__
