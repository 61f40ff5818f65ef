"""Ranks that need not import torch: a process that has imported it forks them, before MPI_Init and before any thread.

`server` imports torch once for all tests, and another one the libraries that a test asks for. `daemon` is what a job's
ranks descend from, and `rank` is what mpiexec starts: it asks the daemon for a fork, lends it its open files, passes
signals on, and ends as the fork ends.
"""
