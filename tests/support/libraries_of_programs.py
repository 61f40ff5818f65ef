"""Imported once, by the process whose forks run the existing programs: their libraries, which take seconds."""

# ruff: noqa: E402, F401
from support import torchvision_operators

torchvision_operators.declare_when_imported()

import sklearn.datasets
import timm
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler
