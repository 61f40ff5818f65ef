"""Finds values that should be equal on all ranks, and differ: digests, the table of these values, and reports."""
