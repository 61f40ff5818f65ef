"""Transports for buffers on GPUs: NCCL, a device-aware MPI, and pinned host memory."""
