"""The torch modules that scope() sees: recorded, placed, mirrored, and their buffers averaged."""
