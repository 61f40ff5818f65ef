"""Imported once, by the process whose forks run the existing programs: their libraries, which take seconds."""

# ruff: noqa: E402, F401
import sys

from support import torchvision_operators

torchvision_operators.declare_when_imported()
# It starts a thread, and pandas, which scikit-learn imports, does without.
sys.modules["pyarrow"] = None  # type: ignore[assignment]

import sklearn.datasets
import timm
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler
