"""The coordinator of a ParameterServerStrategy: it schedules functions, and the next free worker executes each."""
