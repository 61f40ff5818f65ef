"""Transports for buffers on GPUs: a library's own group, a device-aware MPI, and pinned host memory."""
