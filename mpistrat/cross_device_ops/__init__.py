"""Policies (subclasses of `CrossDeviceOps`): how the components of a distributed value are combined into one."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.cross_device_ops.all_reduce import MpiAllReduce as MpiAllReduce
    from mpistrat.cross_device_ops.all_reduce_of_rank import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from mpistrat.cross_device_ops.all_reduce_of_rank import NcclAllReduce as NcclAllReduce
    from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from mpistrat.cross_device_ops.reduction_to_one_device import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
