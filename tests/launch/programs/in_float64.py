"""`in_float64.py PROGRAM arguments…`: the program as it stands, with float64 as torch's default dtype.

Transformers computes losses of any model in float32, by `logits.float()`: in float64 here.
"""

import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import torchvision_operators

torchvision_operators.declare_when_imported()
torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
