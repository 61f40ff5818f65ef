"""The `TPUStrategy` of `tf.distribute.experimental`."""

from mpistrat.cluster_resolver import TPUClusterResolver
from mpistrat.xla.strategy import TPUStrategy
from mpistrat.xla.topology.device_assignment import DeviceAssignment


class ExperimentalTPUStrategy(TPUStrategy):
    """`mpistrat.TPUStrategy`, with the arguments that `tf.distribute.experimental` has.

    Called by: every rank of the job.
    Args:
        tpu_cluster_resolver: the slice; None is the one that this host belongs to.
        device_assignment: which cores each replica has; None has each core be a replica.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


# As users know it: its instances, its errors and pickles show this name.
ExperimentalTPUStrategy.__module__ = __name__.rpartition(".")[0]
ExperimentalTPUStrategy.__name__ = ExperimentalTPUStrategy.__qualname__ = TPUStrategy.__name__
