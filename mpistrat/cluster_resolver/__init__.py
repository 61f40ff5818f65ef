"""Cluster resolvers: they find the tasks of a job, and this process's task. `MPIClusterResolver` is the default."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver as ClusterResolver
    from mpistrat.cluster_resolver.cluster_spec import ClusterSpec as ClusterSpec
    from mpistrat.cluster_resolver.gce import GCEClusterResolver as GCEClusterResolver
    from mpistrat.cluster_resolver.kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from mpistrat.cluster_resolver.kubernetes import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from mpistrat.cluster_resolver.mpi import MPIClusterResolver as MPIClusterResolver
    from mpistrat.cluster_resolver.simple import SimpleClusterResolver as SimpleClusterResolver
    from mpistrat.cluster_resolver.slurm.resolver import (
        SlurmClusterResolver as SlurmClusterResolver,
    )
    from mpistrat.cluster_resolver.tf_config import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from mpistrat.cluster_resolver.tpu.resolver import TPUClusterResolver as TPUClusterResolver
    from mpistrat.cluster_resolver.union import UnionResolver as UnionResolver
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
