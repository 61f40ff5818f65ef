"""Cluster resolvers: who am I, who are the others? `MPIClusterResolver` is the default."""

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
from mpistrat.cluster_resolver.slurm import SlurmClusterResolver as SlurmClusterResolver
from mpistrat.cluster_resolver.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from mpistrat.cluster_resolver.tpu import TPUClusterResolver as TPUClusterResolver
from mpistrat.cluster_resolver.union import UnionResolver as UnionResolver
