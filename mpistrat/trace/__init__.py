"""MPISTRAT_TRACE: records the work of each rank on one timeline of all ranks. Loaded only if the variable is set."""
