"""The names that `tf.tpu.experimental` keeps."""

from mpistrat.strategies.tpu_system import initialize_tpu_system as initialize_tpu_system
from mpistrat.strategies.tpu_system import shutdown_tpu_system as shutdown_tpu_system
from mpistrat.tpu_topology.device_assignment import DeviceAssignment as DeviceAssignment
from mpistrat.tpu_topology.device_assignment import DeviceOrderMode as DeviceOrderMode
from mpistrat.tpu_topology.topology import Topology as Topology
