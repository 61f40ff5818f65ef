"""The transports: each file has one way of moving bytes between the ranks of a group."""
