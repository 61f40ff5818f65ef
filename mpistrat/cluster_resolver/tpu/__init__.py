"""The slice of TPU chips that this process is part of."""

from mpistrat.cluster_resolver.tpu.resolver import TPUClusterResolver as TPUClusterResolver
