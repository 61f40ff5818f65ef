"""Replicas: their contexts, the replicas of one rank, how their values are combined, and their losses."""
