"""The names that `tf.tpu.experimental` keeps."""

from mpistrat.tpu_topology.device_assignment import DeviceAssignment as DeviceAssignment
from mpistrat.tpu_topology.device_assignment import DeviceOrderMode as DeviceOrderMode
from mpistrat.tpu_topology.topology import Topology as Topology
