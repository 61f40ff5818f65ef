"""Policies over values: how the components of distributed values become one."""

from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
from mpistrat.cross_device_ops.all_reduce_of_rank import HierarchicalCopyAllReduce, NcclAllReduce
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpistrat.cross_device_ops.reduction_to_one_device import ReductionToOneDevice

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "MpiAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
]


def __dir__() -> list[str]:
    return __all__
