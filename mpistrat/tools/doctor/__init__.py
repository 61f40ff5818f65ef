"""`mpistrat doctor`: what is wrong with an installation, a job or a cluster, and what to do about it."""
