"""The way of a gradient, from the hook of its parameter to the reduced gradient in `.grad`."""
