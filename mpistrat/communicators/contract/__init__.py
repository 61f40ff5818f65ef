"""The contract of a collective: all ranks make the same call, and it is recorded."""
