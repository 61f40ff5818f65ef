"""PyTorch: what `scope()` mirrors, what `backward()` reduces, and what belongs to a replica."""
