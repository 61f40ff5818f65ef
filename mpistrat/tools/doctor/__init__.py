"""`mpistrat doctor`: finds faults of an installation, a job or a cluster, and says how to mend them."""
