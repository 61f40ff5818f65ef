"""Who waits, and who died.

Each rank keeps a `record` in shared memory of what it does. On each node one process, the `observer`, reads the records
by its `failure_detector`, and reports ranks that die or wait too long. What it imports needs the standard library only:
the observer loads neither NumPy nor MPI. In each rank, `JobEnd` ends the job when ranks fail or leave early.
"""
