"""What Slurm tells of the job, the step and its tasks."""

from mpistrat.cluster_resolver.slurm.resolver import SlurmClusterResolver as SlurmClusterResolver
