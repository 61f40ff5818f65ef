"""Shared memory for the ranks of a node: the job's folder with a record of each rank, and a log of errors."""
