"""The cost of a collective: fitted to measured times, and kept for later jobs."""
