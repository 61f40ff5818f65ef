"""Commands around the library: mpistrat doctor, mpistrat-bench, and the merging of traces."""
