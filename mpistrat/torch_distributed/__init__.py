"""The backend "mpistrat" of `torch.distributed`: PyTorch's programs under `mpirun`, by our communicators."""
