"""One file for each way of moving bytes between the ranks of a group."""
