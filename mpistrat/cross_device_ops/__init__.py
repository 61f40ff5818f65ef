"""Policies over values: how the components of distributed values become one."""

from mpistrat.cross_device_ops.all_reduce import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce as MpiAllReduce
from mpistrat.cross_device_ops.all_reduce import NcclAllReduce as NcclAllReduce
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mpistrat.cross_device_ops.reduction_to_one_device import (
    ReductionToOneDevice as ReductionToOneDevice,
)
