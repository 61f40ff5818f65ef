"""From the hook of a parameter to the reduced gradient in .grad."""
