"""Slurm's variables and commands: the job, the step and its tasks."""

from mpistrat.cluster_resolver.slurm.resolver import SlurmClusterResolver as SlurmClusterResolver
