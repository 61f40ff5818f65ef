"""Cluster resolvers: they find the tasks of a job, and this process's task. `MPIClusterResolver` is the default."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
    from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
    from mpistrat.cluster_resolver.gce import GCEClusterResolver
    from mpistrat.cluster_resolver.kubernetes import (
        KubernetesClusterResolver,
        KubernetesExecutableLocation,
    )
    from mpistrat.cluster_resolver.mpi import MPIClusterResolver
    from mpistrat.cluster_resolver.simple import SimpleClusterResolver
    from mpistrat.cluster_resolver.slurm.resolver import SlurmClusterResolver
    from mpistrat.cluster_resolver.tf_config import TFConfigClusterResolver
    from mpistrat.cluster_resolver.tpu.resolver import TPUClusterResolver
    from mpistrat.cluster_resolver.union import UnionResolver
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]
