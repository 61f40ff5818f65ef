"""Finds ranks that wait too long or have died, and ends the job. Each of three layers imports only from lower layers.

- `records/`: each rank writes into shared memory in which collective it is. `waiting` reads the records while a rank
  waits.
- `observer/`: one process per node reads the records by its `FailureDetector`, and reports ranks that die or wait too
  long. It imports only the standard library: neither NumPy nor MPI. The files `observation`, `node_records` and
  `other_nodes` run in the ranks, and connect them to the observer.
- `ending/`: in each rank, `JobEnd` ends the job when ranks fail or leave early.

The files beside these folders serve all layers; `deadlines` has all numbers of seconds.
"""
