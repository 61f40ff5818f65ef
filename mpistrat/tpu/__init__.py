"""TPU systems, topologies and device assignments, under the names that `tf.tpu.experimental` has."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.xla.system import initialize_tpu_system as initialize_tpu_system
    from mpistrat.xla.system import shutdown_tpu_system as shutdown_tpu_system
    from mpistrat.xla.topology.device_assignment import DeviceAssignment as DeviceAssignment
    from mpistrat.xla.topology.device_assignment import DeviceOrderMode as DeviceOrderMode
    from mpistrat.xla.topology.topology import Topology as Topology
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
