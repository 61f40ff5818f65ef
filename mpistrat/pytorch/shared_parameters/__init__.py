"""One copy of the parameters per node. Each rank of the node updates a slice of it."""
