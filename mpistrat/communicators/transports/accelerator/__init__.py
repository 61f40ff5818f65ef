"""Ways for buffers on GPUs: NCCL, a CUDA-aware MPI, and pinned host memory."""
