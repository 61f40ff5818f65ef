"""A server: it keeps arrays and their optimizers, makes the updates, and copies them to its backup."""
