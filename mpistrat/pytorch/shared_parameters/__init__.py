"""One copy of the parameters per node, of which each rank updates a slice."""
