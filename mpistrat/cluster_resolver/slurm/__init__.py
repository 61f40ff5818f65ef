"""What Slurm tells of the job, the step and its tasks."""
