"""What happens to a gradient, from the hook of its parameter to the reduced gradient in `.grad`."""
