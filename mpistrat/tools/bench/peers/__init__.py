"""The peers that mpistrat is compared with. Each peer has a file here, and does the work by its own means.

A file has two functions, `training_steps(work)` and `all_reduces(values)`. Both return a dict of contestants by name. A
contestant of `training_steps` takes a step and returns this rank's loss. A contestant of `all_reduces` sums the values
over the ranks and returns the result.
"""
