"""Cluster resolvers: who am I, who are the others? `MPIClusterResolver` is the default."""

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver as ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec as ClusterSpec
from mpistrat.cluster_resolver.mpi import MPIClusterResolver as MPIClusterResolver
