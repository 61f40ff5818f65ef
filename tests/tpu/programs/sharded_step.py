"""A two-layer network that is trained on the logical devices of one replica, and on the host beside it.

Tests append the line that prints what they ask for.
"""

import copy
import json

import torch
import torch_xla
from torch import nn

from mpistrat import xla
from mpistrat.xla.logical_devices import LogicalDevices

RUNTIME = xla.start()
RUNTIME.use_spmd()
DEVICE = RUNTIME.device(0)
LOGICAL = LogicalDevices(RUNTIME, RUNTIME.num_devices)
STEPS = 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, inputs, split):
        """With what is said of the input, the first weight and the hidden layer in `split`."""
        inputs = said_of(inputs, split.get("input"))
        weight = said_of(self.first.weight, split.get("weight"))
        hidden = said_of(
            nn.functional.linear(inputs, weight, self.first.bias).relu(), split.get("hidden")
        )
        return self.second(hidden)


def said_of(tensor, parts):
    if parts is None:
        return tensor
    return LOGICAL.replicate(tensor) if parts == "whole" else LOGICAL.split(tensor, parts)


def network_on_device(dtype, spread):
    """The network on the host, and a copy, whose parameters are spread as said, or whole."""
    torch.manual_seed(1)
    host = Network().to(dtype)
    device = copy.deepcopy(host).to(DEVICE)
    for name, parameter in device.named_parameters():
        assert said_of(parameter, spread.get(name, "whole")) is parameter
    return host, device


def step(network, optimizer, inputs, targets, split):
    optimizer.zero_grad(set_to_none=True)
    loss = ((network(inputs, split) - targets) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(spread, split, dtype=torch.float32, momentum=0.0):
    """The greatest differences from the host's of losses, gradients and parameters; compilations of each step."""
    host, device = network_on_device(dtype, spread)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum) for net in (host, device)]
    batches = torch.Generator().manual_seed(2)
    differences, compilations = [], []
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=batches).to(dtype)
        targets = torch.randn(8, 4, generator=batches).to(dtype)
        expected = step(host, optimizers[0], inputs, targets, {})
        on_device = RUNTIME.put([inputs, targets], DEVICE)
        before = RUNTIME.graphs.num_compilations()
        with RUNTIME.graphs.step("step"):
            loss = step(device, optimizers[1], *on_device, split)
        compilations.append(RUNTIME.graphs.num_compilations() - before)
        pairs = [(expected, loss)]
        for here, there in zip(host.parameters(), device.parameters(), strict=True):
            pairs += [(here.grad, there.grad), (here.detach(), there.detach())]
        values = RUNTIME.fetch([there for _, there in pairs])
        for (here, _), value in zip(pairs, values, strict=True):
            assert value.dtype == dtype
            differences.append((here.float() - value.float()).abs().max().item())
    shards = {name: shards_of(parameter) for name, parameter in device.named_parameters()}
    return {"difference": max(differences), "compilations": compilations, "shards": shards}


def shards_of(tensor):
    """The shape of the part that each device has."""
    return [list(part.shape) for part, _ in torch_xla._XLAC._get_local_shards([tensor.detach()])[0]]


def layout_of(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def graph_of(tensors):
    """The layouts that the recorded graph says."""
    lines = torch_xla._XLAC._get_xla_tensors_hlo(tensors).splitlines()
    return [line.split("sharding={")[1].split("}")[0] for line in lines if '"Sharding"' in line]


def answer(value):
    print(json.dumps(value))
