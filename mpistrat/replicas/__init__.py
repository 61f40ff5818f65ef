"""What a replica is: its context, the replicas of one rank, what they combine, and their losses."""
