"""The torch modules of a strategy: they are recorded in `scope()`, placed, and mirrored; their buffers are averaged."""
