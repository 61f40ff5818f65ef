"""Ranks train by torch.autograd.grad: no rank hears of the others before the end of the program.

Arguments: "alive" if the model lives until then; "right" if the program reduces the gradients by itself.
"""

import sys

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms


def train() -> torch.nn.Module:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for features, target in loader:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(mse_loss(model(features), target), parameters)
        if "right" in sys.argv:
            context = ms.get_replica_context()
            gradients = [context.all_reduce("mean", gradient) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


model = train()
if "alive" not in sys.argv:
    del model
