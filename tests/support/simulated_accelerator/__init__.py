"""A simulated accelerator: `load()` gives torch the device kind "sim" and the module `torch.sim`."""

from support.simulated_accelerator.torch_sim import load as load
