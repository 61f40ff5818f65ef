"""`in_float64.py PROGRAM arguments…`: the program as it stands, with float64 as torch's default dtype.

Transformers computes losses of any model in float32, by `logits.float()`: in float64 here.
"""

import runpy
import sys

import torch

torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
