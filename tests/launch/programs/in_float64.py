"""`in_float64.py PROGRAM arguments…`: the program as it stands, with float64 as torch's default dtype."""

import runpy
import sys

import torch

torch.set_default_dtype(torch.float64)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
