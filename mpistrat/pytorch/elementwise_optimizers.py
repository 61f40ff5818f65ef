"""Torch's optimizers that update element by element: any part of a parameter can be stepped without the rest."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

# Each element of the parameter and of its state depends on the same element of the gradient alone.
_NAMES = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Rprop Adagrad Adadelta ASGD"
_ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}


def why_not_elementwise(optimizer: type[Optimizer]) -> str:
    """Return why this optimizer class cannot step a slice of a parameter without the rest; "" if it can.

    It can if it is an elementwise class of torch itself (a subclass does not count), or has `elementwise = True`.
    Called by: steps of parameters that ranks share, and parameter servers.
    """
    if optimizer in _ELEMENTWISE or getattr(optimizer, "elementwise", False) is True:
        return ""
    return (
        f"{optimizer.__name__} is not known to update element by element (if it does, set its class attribute "
        "`elementwise = True`)"
    )
