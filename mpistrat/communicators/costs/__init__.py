"""What a collective costs: fitted to measured times, and kept for later jobs."""
