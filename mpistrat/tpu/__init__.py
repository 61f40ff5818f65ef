"""The names that `tf.tpu.experimental` keeps."""

from mpistrat.xla.system import initialize_tpu_system as initialize_tpu_system
from mpistrat.xla.system import shutdown_tpu_system as shutdown_tpu_system
from mpistrat.xla.topology.device_assignment import DeviceAssignment as DeviceAssignment
from mpistrat.xla.topology.device_assignment import DeviceOrderMode as DeviceOrderMode
from mpistrat.xla.topology.topology import Topology as Topology
