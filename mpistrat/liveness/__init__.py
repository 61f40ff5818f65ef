"""What each rank of this node is doing, readable by any process of the user, and a process that watches it.

Everything here needs the standard library only: the observer loads neither NumPy nor MPI.
"""
