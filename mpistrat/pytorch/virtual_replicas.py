"""Several replicas of torch modules in one rank. They share one copy of the parameters, and run one after another.

Each replica has its own `.grad`, buffers and random generator states. These are swapped when the next replica runs.
"""

from __future__ import annotations

import contextlib
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

OwnTensor = torch.Tensor | None  # the `.grad` or buffer that a replica has in a slot


class TorchState:
    """The `ReplicaState` (the state of each replica that is swapped) for PyTorch: gradients, buffers and generators.

    Between runs replica 0's state is in the modules. The program may change it there: set gradients to None, load
    buffers, seed. The next run gives such a change to all replicas.
    Args:
        registry: the mirrored parameters and buffers.
        count: number of replicas of this rank.
        writes: finds parameters that replicas have written themselves.
    """

    def __init__(self, registry: Registry, count: int, writes: WritesByHand) -> None:
        self._registry = registry
        self.writes = writes
        # Each replica's gradients and buffers, as they were when the rank last switched to another replica.
        self._away: list[dict[Slot, OwnTensor]] = [{} for _ in range(count)]
        self._generators: list[list[torch.Tensor]] = []
        self._seed = torch.initial_seed()
        # Replica 0's gradients and buffers, with their versions, when the last run ended.
        self._left: dict[Slot, tuple[OwnTensor, int]] = {}

    def begin(self) -> None:
        """Begin a run: copy gradients and buffers of replica 0 that the program has changed to the other replicas.

        Tensors that are the same and unwritten since the last run are not copied: each replica keeps its own.
        """
        others = self._away[1:]
        # Modules that share a tensor share its copies, too.
        nothing = [None] * len(others)
        clones: dict[int, Sequence[OwnTensor]] = {id(None): nothing}
        for slot, tensor in self._registry.own_tensors():
            left, left_version = self._left.get(slot, (None, 0))
            if tensor is left and version(tensor) == left_version:
                continue
            if tensor is not None and id(tensor) not in clones:
                # In inference mode clones would be inference tensors, and a later training could not write them.
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
        """Return the random generator states of each replica for the next run.

        All replicas get the generators' present states before the first run, if the program has called
        `torch.manual_seed` with another seed, or if all replicas had equal states after the last run. Otherwise only
        replica 0 gets them, and each other replica goes on with its own. So after one seed each replica draws the same
        numbers as it would as a rank's only replica.
        Returns: a list for each replica: the CPU generator's state, and an accelerator's if one is in use.
        """
        now = _generators()
        others = self._generators[1:]
        in_step = all(
            torch.equal(first, state)
            for other in others
            for first, state in zip(self._generators[0], other, strict=False)
        )
        if in_step or torch.initial_seed() != self._seed:
            return [now] * len(self._away)
        return [now, *others]

    def set_generators(self, states: list[list[torch.Tensor]]) -> None:
        """Let the next run begin with `states`, one list for each replica. The generators get replica 0's now."""
        _set_generators(states[0])
        self._generators = [_generators(), *states[1:]]
        self._seed = torch.initial_seed()

    def end(self) -> None:
        for slot, tensor in self._registry.own_tensors():
            self._left[slot] = tensor, version(tensor)
        self._generators[0] = _generators()
        self._seed = torch.initial_seed()

    def inherit(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Return a function that makes a context manager. Inside, a replica's thread has the modes of this thread.

        The modes are inference mode, whether gradients are recorded, the default device, autocast, and the
        accelerator's current stream, all as they are now.
        """
        is_inference = torch.is_inference_mode_enabled()
        records = torch.is_grad_enabled()
        device = arrays.default_device()
        autocasts = []
        for kind in ("cpu", torch_accelerator()):
            if kind and torch.is_autocast_enabled(kind):
                autocasts.append((kind, torch.get_autocast_dtype(kind)))
        module = _accelerator_in_use()
        stream = None
        if module is not None:
            stream = module.current_stream()

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            torch.get_num_threads()  # sets up this thread's OpenMP; else it would use all cores
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode(is_inference))
                stack.enter_context(torch.set_grad_enabled(records))
                stack.enter_context(device)
                for kind, dtype in autocasts:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                if stream is not None:
                    stack.enter_context(module.stream(stream))  # enters its device, too
                yield

        return enter

    def switch(self, leaving: int, entering: int) -> None:
        self._away[leaving] = dict(self._registry.own_tensors())
        for slot in self._away[leaving]:
            slot.put(self._away[entering].get(slot))
        self._generators[leaving] = _generators()
        _set_generators(self._generators[entering])

    def copies(self, slots: Sequence[BufferSlot]) -> list[list[torch.Tensor | None]]:
        """Return the tensors that each replica of this rank has for the modules' buffers `slots`.

        A replica that has never run has replica 0's tensors. Context: between runs, when replica 0's buffers are in the
        modules.
        Returns: a list for each replica, replica 0 first. It has an entry for each of `slots`, in their order: the
            tensor, or None if the program has dropped the buffer.
        """
        firsts = [slot.tensor() for slot in slots]
        copies = [firsts]
        for away in self._away[1:]:
            of_replica = []
            for slot, first in zip(slots, firsts, strict=True):
                tensor = away.get(slot)
                of_replica.append(first if tensor is None else tensor)
            copies.append(of_replica)
        return copies


def _accelerator_in_use() -> Any:
    """Return torch's module of this process's accelerator; None without one, or if nothing has used it."""
    kind = torch_accelerator()
    if not kind:
        return None
    module = torch.get_device_module(kind)
    return module if module.is_initialized() else None


def _generators() -> list[torch.Tensor]:
    """Return the state of the CPU's random generator and, if in use, of the accelerator's current device."""
    states = [torch.get_rng_state()]
    module = _accelerator_in_use()
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
    """Have `replicas` swap gradients, buffers and generators whenever this rank switches to another replica.

    From now on writes to parameters by hand raise at the end of a replica's turn (its work between two meetings of
    the rank's replicas).
    Args: modules: returns the strategy's modules.
    """
    writes = WritesByHand(registry, replicas.count, modules)
    replicas.states.append(TorchState(registry, replicas.count, writes))
    replicas.at_turn_end.append(writes.end_turn)
    hooks.refuse_steps_of_schedulers()


def stepped(replicas: Replicas) -> None:
    """Note that an optimizer has changed parameters, so that the change is no error at the end of the replica's turn.

    Called by: the hook after `optimizer.step()`, for the rank's replica 0. Does nothing if the rank has one replica.
    """
    state = _state_of(replicas)
    if state is not None:
        state.writes.stepped()


def _state_of(replicas: Replicas) -> TorchState | None:
    return next((state for state in replicas.states if isinstance(state, TorchState)), None)


def generators_of(replicas: Replicas, num_local_replicas: int) -> list[list[torch.Tensor]]:
    """Return a list of generator states for each replica of this rank: the CPU's and, if in use, the accelerator's.

    Called by: a checkpoint that saves random states.
    """
    state = _state_of(replicas)
    return [_generators()] * num_local_replicas if state is None else state.generators()


def set_generators_of(replicas: Replicas, states: list[list[torch.Tensor]]) -> None:
    """Set the generator states of each replica of this rank. An accelerator's states are ignored if there is none.

    Args: states: a list for each replica, from `generators_of`.
    """
    if not torch_accelerator():
        states = [of_replica[:1] for of_replica in states]
    state = _state_of(replicas)
    if state is None:
        _set_generators(states[0])
    else:
        state.set_generators(states)


def seeded_generators(seed: int) -> list[torch.Tensor]:
    """Return the generator states as `torch.manual_seed(seed)` would leave them."""
    states = [torch.Generator().manual_seed(seed).get_state()]
    if _accelerator_in_use() is not None:
        states.append(torch.Generator(torch_accelerator()).manual_seed(seed).get_state())
    return states


def copies_of_buffers(
    replicas: Replicas, slots: Sequence[BufferSlot]
) -> list[list[torch.Tensor | None]]:
    """Return, for each replica of this rank, its own tensors of the buffers `slots`. Context: cross-replica."""
    state = _state_of(replicas)
    if state is None:
        return [[slot.tensor() for slot in slots]]
    return state.copies(slots)
