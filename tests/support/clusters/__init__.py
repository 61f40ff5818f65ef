"""Clusters on one machine: a real Slurm, nodes in network namespaces, and environments that launchers make."""
