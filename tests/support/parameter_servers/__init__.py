"""Parameter servers inside a test."""
