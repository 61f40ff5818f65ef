"""The `TPUStrategy` of `tf.distribute.experimental`."""

from mpistrat.cluster_resolver import TPUClusterResolver
from mpistrat.xla import strategy
from mpistrat.xla.topology.device_assignment import DeviceAssignment


class ExperimentalTPUStrategy(strategy.TPUStrategy):
    """`mpistrat.TPUStrategy` with the arguments that it has in `tf.distribute.experimental`.

    Called by: every rank of the job.
    Args:
        tpu_cluster_resolver: resolver of the TPU slice; None is the slice that this host belongs to.
        device_assignment: the cores of each replica; None makes each core a replica.

    Example, on a TPU::

        resolver = ms.cluster_resolver.TPUClusterResolver("local")
        strategy = ms.experimental.TPUStrategy(resolver)
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


TPUStrategy = ExperimentalTPUStrategy
# Instances, errors and pickles show the public name.
TPUStrategy.__module__ = __name__.rpartition(".")[0]
TPUStrategy.__name__ = TPUStrategy.__qualname__ = "TPUStrategy"
