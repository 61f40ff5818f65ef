"""Several replicas of a torch module in one rank: one storage of parameters, the rest swapped.

`.grad`, buffers and the state of the random generator belong to a replica; they are put away and
brought out where replicas take turns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat import arrays
from mpistrat.machine.devices import torch_accelerator
from mpistrat.pytorch import hooks
from mpistrat.pytorch.modules.registry import BufferSlot, Registry, Slot, version
from mpistrat.pytorch.writes_by_hand import WritesByHand

if TYPE_CHECKING:
    from mpistrat.replicas.replicas import Replicas


class TorchState:
    """A `ReplicaState` for PyTorch.

    Between runs replica 0's state is out, and the program may change it: set gradients to None, load
    buffers, seed. What the program has changed it has changed for all replicas.
    """

    def __init__(self, registry: Registry, count: int, writes: WritesByHand) -> None:
        self._registry, self.writes = registry, writes
        # Each replica's gradients and buffers while another's are out.
        self._away: list[dict[Slot, torch.Tensor | None]] = [{} for _ in range(count)]
        self._generators: list[list[torch.Tensor]] = []
        self._seed = torch.initial_seed()
        # What replica 0's gradients and buffers were, with their versions, when the last run ended.
        self._left: dict[Slot, tuple[torch.Tensor | None, int]] = {}

    def begin(self) -> None:
        others = self._away[1:]
        # What modules share, their copies share.
        clones: dict[int, Sequence[torch.Tensor | None]] = {id(None): [None] * len(others)}
        for slot, tensor in self._registry.own_tensors():
            left, left_version = self._left.get(slot, (None, 0))
            if tensor is left and (tensor is None or version(tensor) == left_version):
                continue
            if tensor is not None and id(tensor) not in clones:
                # Copies made for an evaluation must serve the training that follows it.
                with torch.inference_mode(False):
                    clones[id(tensor)] = [tensor.detach().clone() for _ in others]
            for away, clone in zip(others, clones[id(tensor)], strict=True):
                away[slot] = clone
            if isinstance(slot, BufferSlot):
                slot.settle([tensor, *clones[id(tensor)]])
        self._left.clear()
        self.writes.begin()
        self._generators = self.generators()
        self._seed = torch.initial_seed()

    def generators(self) -> list[list[torch.Tensor]]:
        """The states of each replica's generators with which the next run begins.

        Replicas whose generators were in step stay so; otherwise the program's is replica 0's.
        So one seed gives each replica the numbers that it would draw on a rank of its own.
        """
        now = _generators()
        others = self._generators[1:]
        in_step = all(all(map(torch.equal, self._generators[0], other)) for other in others)
        if not self._generators or in_step or torch.initial_seed() != self._seed:
            return [now] * len(self._away)
        return [now, *others]

    def set_generators(self, states: list[list[torch.Tensor]]) -> None:
        """Let the next run begin with `states`, one for each replica."""
        _set_generators(states[0])
        self._generators = [_generators(), *states[1:]]
        self._seed = torch.initial_seed()

    def end(self) -> None:
        for slot, tensor in self._registry.own_tensors():
            self._left[slot] = tensor, 0 if tensor is None else version(tensor)
        self._generators[0] = _generators()
        self._seed = torch.initial_seed()

    def inherit(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        device, module = arrays.default_device(), _accelerator_in_use()
        modes: list[Callable[[], contextlib.AbstractContextManager[object]]] = [
            functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            lambda: device,
        ]
        for kind in ("cpu", torch_accelerator()):
            if kind and torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                modes.append(functools.partial(torch.autocast, kind, dtype=dtype))
        if module is not None:
            # Entering a stream enters its device.
            modes.append(functools.partial(module.stream, module.current_stream()))

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            torch.get_num_threads()  # has torch set up this thread's OpenMP, which knows all cores else
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                yield

        return enter

    def switch(self, leaving: int, entering: int) -> None:
        self._away[leaving] = dict(self._registry.own_tensors())
        for slot in self._away[leaving]:
            slot.put(self._away[entering].get(slot))
        self._generators[leaving] = _generators()
        _set_generators(self._generators[entering])

    def copies(self, slots: Sequence[BufferSlot]) -> list[list[torch.Tensor | None]]:
        """Each replica's copy of the buffers `slots`, with replica 0's in the modules."""
        copies = [[slot.tensor() for slot in slots]]
        for away in self._away[1:]:
            kept = zip(map(away.get, slots), copies[0], strict=True)
            copies.append([first if tensor is None else tensor for tensor, first in kept])
        return copies


def _accelerator_in_use() -> Any:
    """torch's module of this process's accelerator; None where there is none, or nothing has used it yet."""
    kind = torch_accelerator()
    module: Any = torch.get_device_module(kind) if kind else None
    return module if module is not None and module.is_initialized() else None


def _generators() -> list[torch.Tensor]:
    """The state of the CPU's generator and, where an accelerator is in use, of the current one's."""
    states, module = [torch.get_rng_state()], _accelerator_in_use()
    if module is not None:
        states.append(module.get_rng_state())
    return states


def _set_generators(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(torch_accelerator()).set_rng_state(state)


def install(
    replicas: Replicas, registry: Registry, modules: Callable[[], Iterable[torch.nn.Module]]
) -> None:
    """Swap the state of torch modules when `replicas` take turns. Args: modules: gives the strategy's."""
    writes = WritesByHand(registry, replicas.count, modules)
    replicas.states.append(TorchState(registry, replicas.count, writes))
    replicas.at_turn_end.append(writes.end_turn)
    hooks.refuse_steps_of_schedulers()


def stepped(replicas: Replicas) -> None:
    """An optimizer's step has changed parameters. Called by: local replica 0, inside run."""
    state = _state_of(replicas)
    if state is not None:
        state.writes.stepped()


def _state_of(replicas: Replicas) -> TorchState | None:
    return next((state for state in replicas.states if isinstance(state, TorchState)), None)


def generators_of(replicas: Replicas, num_local_replicas: int) -> list[list[torch.Tensor]]:
    """The states of the generators of each local replica: the CPU's and, where it is in use, the accelerator's."""
    state = _state_of(replicas)
    return [_generators()] * num_local_replicas if state is None else state.generators()


def set_generators_of(replicas: Replicas, states: list[list[torch.Tensor]]) -> None:
    """Let the generators of each local replica go on from `states`; those of accelerators only where there are some."""
    if not torch_accelerator():
        states = [of_replica[:1] for of_replica in states]
    state = _state_of(replicas)
    if state is None:
        _set_generators(states[0])
    else:
        state.set_generators(states)


def seeded_generators(seed: int) -> list[torch.Tensor]:
    """The states of generators as `torch.manual_seed(seed)` leaves them."""
    states = [torch.Generator().manual_seed(seed).get_state()]
    if _accelerator_in_use() is not None:
        states.append(torch.Generator(torch_accelerator()).manual_seed(seed).get_state())
    return states


def copies_of_buffers(
    replicas: Replicas, slots: Sequence[BufferSlot]
) -> list[list[torch.Tensor | None]]:
    """Each local replica's copy of the buffers `slots`. Context: cross-replica."""
    state = _state_of(replicas)
    return [[slot.tensor() for slot in slots]] if state is None else state.copies(slots)
