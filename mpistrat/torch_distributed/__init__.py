"""The backend "mpistrat" of `torch.distributed`: it runs PyTorch programs under `mpirun`, by our communicators."""
