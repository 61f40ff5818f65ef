"""`mpistrat-bench`: what the machine gives, and what mpistrat makes of it."""
