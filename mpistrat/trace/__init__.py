"""MPISTRAT_TRACE: what each rank did when, as one timeline of all ranks. Loaded only where it is asked for."""
