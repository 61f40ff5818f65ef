"""TPU systems, topologies and device assignments, under the names that `tf.tpu.experimental` has."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.xla.system import initialize_tpu_system, shutdown_tpu_system
    from mpistrat.xla.topology.device_assignment import DeviceAssignment, DeviceOrderMode
    from mpistrat.xla.topology.topology import TpuTopology as Topology
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
