"""`mpistrat-bench`: measures how fast the machine is, and how fast mpistrat is on it."""
