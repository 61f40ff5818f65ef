"""The ranks of a job with servers: how they meet, continue after the death of a rank, and end."""
