"""The coordinator of a ParameterServerStrategy: it schedules functions, and any worker executes each function."""
