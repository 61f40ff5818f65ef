"""Describes the slice of TPU chips that contains this host."""

from mpistrat.cluster_resolver.tpu.resolver import TPUClusterResolver as TPUClusterResolver
