"""Who waits, who died, and how a job ends: three floors, each of which imports from the floors below it alone.

- `records/`: what each rank does, in shared memory. `waiting` reads the records while a rank waits.
- `observer/`: on each node one process reads the records by its `FailureDetector`, and reports ranks that die or wait
  too long. What it imports needs the standard library only: the observer loads neither NumPy nor MPI. Of this floor,
  `observation`, `node_records` and `other_nodes` have the ranks observed, and run in the ranks alone.
- `ending/`: in each rank, `JobEnd` ends the job when ranks fail or leave early.

The files beside the floors serve all of them; `deadlines` has all numbers of seconds.
"""
