"""One copy of the parameters per node. Each rank updates a slice of it."""
