"""What each rank does, in shared memory: its record, the job's folder, and the errors noted there."""
