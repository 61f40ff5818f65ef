"""Records the steps of torch's optimizers, with the losses, inputs and buffers that belong to them.

It also makes dropout an identity, because its random numbers belong to a rank.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.optim import Optimizer
from torch.optim import optimizer as step_hooks

from mpistrat import arrays
from mpistrat.context import current_local_replica
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.reducer import replica_here
from mpistrat.tools.verify.recording import Array, Recording, Step, sample

_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d")


class TorchSteps:
    """Records each optimizer step of the process.

    Args:
        recording: gets the names and facts.
        ended: is called with each step that has ended.
        shaken: whether gradients are changed by rounding, for the control.
    """

    def __init__(
        self, recording: Recording, ended: Callable[[Step], None], *, shaken: bool
    ) -> None:
        self._recording = recording
        self._ended = ended
        self._noise = torch.Generator().manual_seed(7) if shaken else None
        self._step = Step()
        self._roots: list[Module] = []  # the modules that the program calls
        self._optimizers: list[Optimizer] = []
        self._depth = 0  # calls of modules around this code
        self._random_state: Tensor | None = None  # at the first forward since the last backward()

    def watch(self) -> None:
        """Replace functions of torch and register hooks. Called by: the process of a run, once."""
        step_hooks.register_optimizer_step_pre_hook(self._before)
        step_hooks.register_optimizer_step_post_hook(self._after)
        for owner, name, make in (
            (Module, "__call__", self._recorded_call),
            (Tensor, "backward", self._recorded_backward),
        ):
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(make(original)))
        for name in _DROPOUTS:
            setattr(torch.nn.functional, name, self._no_dropout)

    def _recorded_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(module: Module, *args: Any, **kwargs: Any) -> Any:
            self._enter(module, args, kwargs)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return recorded

    def _recorded_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def recorded(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._random_state is not None:
                self._step.draws |= not torch.equal(torch.get_rng_state(), self._random_state)
                self._random_state = None
            backward(loss, *args, **kwargs)
            self._step.losses.append((float(loss.detach().sum()), _share()))

        return recorded

    def _no_dropout(
        self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        self._recording.switched_off |= training and p > 0
        return input

    def _enter(self, module: Module, args: Any, kwargs: Any) -> None:
        """Note a call of a module. A call from outside all modules notes its inputs, too."""
        self._step.calls += 1
        if self._depth == 0 and module not in self._roots:
            self._roots.append(module)
        if not module.training:
            return
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            self._recording.norms.add(type(module).__name__)
        share = getattr(module, "dropout", None)  # attention and RNNs hand it on
        if isinstance(share, float) and share > 0:
            self._recording.switched_off = True
            setattr(module, "dropout", 0.0)  # noqa: B010
        if module._backward_hooks or module._backward_pre_hooks:
            self._recording.hooks.add(type(module).__name__)
        if self._depth == 0 and torch.is_grad_enabled():
            if self._random_state is None:
                self._random_state = torch.get_rng_state()
            self._note_inputs([_on_host(tensor) for tensor in _tensors([args, kwargs])])

    def _note_inputs(self, inputs: list[Array]) -> None:
        self._step.inputs += sum(float(np.abs(array).sum(dtype=float)) for array in inputs)
        if inputs and inputs[0].ndim:
            self._step.examples += [zlib.crc32(row.tobytes()) for row in inputs[0]]
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self._note_epsilon(torch.get_autocast_dtype(kind))

    def _note_epsilon(self, dtype: torch.dtype) -> None:
        if dtype.is_floating_point:
            epsilon = torch.finfo(dtype).eps
            self._recording.epsilon = max(self._recording.epsilon, epsilon)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not _is_recorded(optimizer):
            return None
        self._note("before", self._parameters(optimizer))
        if hooks.has_closure(args, kwargs):
            return hooks.with_closure(args, kwargs, functools.partial(self._close, optimizer))
        self._note_gradients(optimizer)
        return None

    def _close(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._note_gradients(optimizer)
        return loss

    def _note_gradients(self, optimizer: Optimizer) -> None:
        found = self._parameters(optimizer)
        gradients = {key: p.grad for key, p in found.items() if p.grad is not None}
        if self._noise is not None:
            _shake([*gradients.values()], self._noise, self._recording.epsilon)
        self._note("gradients", gradients)

    def _note(self, kind: str, tensors: dict[str, Tensor]) -> None:
        self._step.tensors[kind] = {key: sample(_on_host(t)) for key, t in tensors.items()}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_recorded(optimizer):
            return
        self._note("buffers", self._named("named_buffers"))
        self._note("values", self._parameters(optimizer))
        step = self._step
        step.rates = [float(group.get("lr", 0)) for group in optimizer.param_groups]
        self._step = Step()
        self._ended(step)

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the parameters of an optimizer by keys that are equal in all runs, and note their names."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        names = {id(p): name for name, p in self._named("named_parameters").items()}
        found = {}
        for number, parameter in enumerate(hooks.parameters_of(optimizer)):
            key = f"parameter {number} of optimizer {self._optimizers.index(optimizer)}"
            found[key] = parameter
            label = names.get(id(parameter), key)
            self._recording.labels[key] = label
            self._note_epsilon(parameter.dtype)
            own = {**(parameter._backward_hooks or {})}
            own |= parameter._post_accumulate_grad_hooks or {}
            if any(not _is_ours(hook) for hook in own.values()):
                self._recording.hooks.add(label)
        return found

    def _named(self, method: str) -> dict[str, Tensor]:
        """Return the parameters or buffers of the modules that the program calls, by names."""
        found: dict[str, Tensor] = {}
        for root in self._roots:
            inner = getattr(root, "module", root)  # inside DistributedDataParallel
            for name, tensor in getattr(inner, method)():
                found.setdefault(f"{type(inner).__name__}.{name}", tensor)
        return found


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("mpistrat.")


def _is_recorded(optimizer: Optimizer) -> bool:
    """Whether this is the program's optimizer, in the first replica of the rank."""
    return current_local_replica() in (0, None) and not hooks.is_twin(optimizer)


def _share() -> float:
    """Return the weight of this rank's last loss in the loss of all ranks."""
    here = replica_here()
    if here is not None and here[1].share is not None:
        return here[1].share
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 1.0 / torch.distributed.get_world_size()
    return 1.0


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _on_host(tensor: Tensor) -> Array:
    """Return the numbers of a tensor; of a sharded tensor, those of this rank's part."""
    tensor = tensor.detach()
    if arrays.is_sharded(tensor):
        tensor = getattr(tensor, "to_local")()  # noqa: B009
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.cpu().resolve_conj().resolve_neg().numpy()


def _shake(gradients: list[Tensor], noise: torch.Generator, epsilon: float) -> None:
    """Change gradients by rounding: by up to 2 epsilon of each number, and of the mean square of all numbers.

    The second part stands for sums that cancel, such as the gradient of a bias before a batch norm. Zeros stay.
    """
    dense = [
        g.detach() for g in gradients if g.layout is torch.strided and not arrays.is_sharded(g)
    ]
    squares = sum(float(g.abs().double().square().sum()) for g in dense)
    typical = (squares / max(1, sum(g.numel() for g in dense))) ** 0.5
    for gradient in dense:
        drawn = torch.rand(gradient.shape, generator=noise, device="cpu") * 4 - 2
        sizes = gradient.abs() + typical * (gradient != 0)
        gradient.add_(epsilon * drawn.to(sizes) * sizes)
