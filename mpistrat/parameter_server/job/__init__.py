"""The ranks of a job with servers: how they meet, go on without lost ranks, and end."""
