"""PyTorch: modules that `scope()` mirrors, gradients that `backward()` reduces, and the state of each replica."""
