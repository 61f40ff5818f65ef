"""Optimizer steps of parameters that a node's ranks share. Each rank updates its own slice and the state of that slice.

A twin of the optimizer (a second object of its class) takes the step. The twin's parameters are one-dimensional slices.
So an exception cannot leave the optimizer itself half changed.

The state is shared like the parameters. In `optimizer.state` each rank sees the whole state, in the parameters' shapes,
so `state_dict()` is complete on any rank. The next step takes over the state that `load_state_dict` puts there.

Every rank has a slice of every parameter, perhaps an empty one, so step counters are equal on all ranks.
"""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from mpistrat.communicators.node.common_memory import CommonMemory, View
from mpistrat.pytorch import hooks
from mpistrat.pytorch.elementwise_optimizers import why_not_elementwise
from mpistrat.pytorch.shared_parameters.blocks import Block, ParameterPages, Settling

if TYPE_CHECKING:
    from mpistrat.pytorch.shared_parameters.shared_parameters import SharedParameters


class SliceSteps:
    """Makes the steps of all optimizers of one strategy's shared parameters. The hooks around `step` call it."""

    def __init__(self, shared: SharedParameters) -> None:
        self.shared = shared
        self._slices: weakref.WeakKeyDictionary[Optimizer, _Slices] = weakref.WeakKeyDictionary()
        self._whole: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin an optimizer step of shared parameters: publish writes, and let a twin step slices. Collective.

        Called by: the hook before `optimizer.step()` inside `run`.
        Args: args, kwargs: the arguments of the step; `args[0]` is the optimizer.
        Returns: (args, kwargs) with the twin in place of the optimizer. None if the optimizer itself is to step: it has
            no shared parameter; or it has a closure or does not update element by element. Then rank 0 warns once, and
            every rank steps whole parameters.
        Raises: RuntimeError if a parameter was given other memory inside `run`.
        """
        parameters = hooks.parameters_of(optimizer)
        if all(self.shared.place_of(p) is None for p in parameters):
            return None
        self.shared.check_unmoved(parameters)
        why = why_not_elementwise(type(optimizer))
        if hooks.has_closure(args, kwargs):
            why = "step(closure) reads whole parameters"
        if why:
            # Each rank updates its own view, copied on write; `after` makes the views equal again.
            if optimizer not in self._whole:
                self._whole.add(optimizer)
                self.shared.warn(
                    f"{why}: every rank computes whole steps of this {type(optimizer).__name__}, and keeps all of its "
                    "state"
                )
            return None
        slices = self._slices.setdefault(optimizer, _Slices(self.shared))
        return (slices.begin(optimizer, parameters), *args[1:]), kwargs

    def after(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """End a step: publish the new slices, so that all ranks see the whole parameters and state. Collective.

        Args: stepped: the optimizer that took the step: the twin, or `optimizer` itself. In that case the ranks only
            make whole parameters equal, and nothing happens without shared parameters.
        """
        if stepped is not optimizer:
            self._slices[optimizer].end(optimizer, stepped)
            hooks.dismiss_twin(optimizer, stepped)
        elif optimizer in self._whole:
            self.shared.settle()


class _Slice:
    """This rank's slice of one shared parameter.

    Attributes:
        first, end: the slice's first element in the parameter, and the element after its last.
        tensor: the slice, one-dimensional, in the shared memory itself; the twin's parameter.
        state: by name, pairs of two tensors of the optimizer's state: this rank's slice in the shared memory, and the
            whole in this rank's view, in the parameter's shape.
    """

    def __init__(self, parameter: torch.Tensor, place: ParameterPages) -> None:
        self.parameter = parameter
        self.place = place
        self.first, self.end = place.own(place.block.values)
        self.tensor = self.of(place.block.values.shared, place.dtype)
        self.state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradient: tuple[View, torch.Tensor] | None = None

    def of(self, memory: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's slice of the parameter as a view of `memory`. Args: dtype: the dtype of the elements."""
        start = self.place.first
        size = self.place.dtype.itemsize
        first = start + self.first * size
        end = start + self.end * size
        return torch.from_numpy(memory[first:end]).view(dtype)

    def take_gradient(self) -> None:
        gradient = self.parameter.grad
        if gradient is None:
            self.tensor.grad = None
            return
        view = self.place.block.gradient_view
        if not self.place.holds(gradient, view):  # the program has put the gradient elsewhere
            self._gradient = None
            flat = self.place.in_order(gradient.detach())
            self.tensor.grad = flat[self.first : self.end]
            return
        if self._gradient is None or self._gradient[0] is not view:
            self._gradient = (view, self.of(view.memory, self.place.dtype))
        if self.tensor.grad is not self._gradient[1]:
            self.tensor.grad = self._gradient[1]

    def leave(self, state: dict[str, Any]) -> None:
        """Replace shared tensors in an optimizer's `state` of this parameter by copies in private memory.

        Called by: a step that finds the parameter no longer shared.
        """
        for name, (_, whole) in self.state.items():
            if state.get(name) is whole:
                state[name] = whole.clone()


class _Slices:
    """This rank's slices of one optimizer's shared parameters. The object does not refer to the optimizer."""

    def __init__(self, shared: SharedParameters) -> None:
        self._shared = shared
        self._slices: dict[Any, _Slice] = {}
        self._state: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
        self._memories: dict[tuple[Block, str], tuple[CommonMemory, View]] = {}
        self._settling = Settling(shared.communicator, "optimizer.step() of shared parameters")

    def begin(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> Optimizer:
        """Find shared parameters, publish this rank's writes, and return the twin that steps its slices. Collective.

        The twin's parameters have the slices' gradients, and its state is of the slices. Parameters that are not shared
        are in the twin as they are.
        Args: parameters: all parameters of `optimizer`.
        """
        self._find_slices(optimizer, parameters)
        blocks = self._shared.blocks(self._slices)
        for block, name in list(self._memories):
            if block not in blocks:
                del self._memories[block, name]
        values = [(block.values, block.value_view) for block in blocks]
        self._settling.begin([*values, *self._memories.values()])
        self._take_state(optimizer)
        for part in self._slices.values():
            part.take_gradient()
        stepped = {parameter: part.tensor for parameter, part in self._slices.items()}

        def slices_of(group: list[torch.Tensor]) -> list[torch.Tensor]:
            return [stepped.get(parameter, parameter) for parameter in group]

        twin = hooks.twin_of(optimizer, slices_of)
        twin.state = self._state  # type: ignore[assignment]
        return twin

    def _find_slices(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Make a slice of each shared parameter. One that is no longer shared gets a private copy of its state."""
        for parameter in parameters:
            place = self._shared.place_of(parameter)
            part = self._slices.get(parameter)
            if place is None:
                if part is not None:  # no longer shared
                    part.leave(optimizer.state[parameter])
                    del self._slices[parameter]
            elif part is None or part.place is not place:
                self._slices[parameter] = _Slice(parameter, place)

    def _take_state(self, optimizer: Optimizer) -> None:
        """Fill the twin's state from `optimizer.state`, where the program may have put other state since the last step.

        Tensors of a parameter's shape move to shared memory; `optimizer.state` then has views of it.
        """
        self._state.clear()
        for parameter, whole in optimizer.state.items():
            part = self._slices.get(parameter)
            if part is None:
                self._state[parameter] = whole
                continue
            state = self._state[part.tensor]
            for name, value in whole.items():
                kept = part.state.get(name)
                if kept is not None and value is kept[1]:
                    state[name] = kept[0]
                elif isinstance(value, torch.Tensor) and value.shape == part.place.shape:
                    piece, view = self._share(part, name, value)
                    flat = part.place.in_order(value.detach())
                    piece.copy_(flat[part.first : part.end])
                    state[name] = piece
                    whole[name] = view
                else:
                    state[name] = value

    def _share(
        self, part: _Slice, name: str, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shared memory for a tensor of an optimizer's state. Collective if it is new.

        Args:
            part: this rank's slice of the parameter.
            name: the name of the state, such as "exp_avg".
            value: a tensor with the state's dtype; its contents are not copied.
        Returns: this rank's slice in the shared memory, one-dimensional; and the whole in this rank's view, in the
            parameter's shape.
        Raises: RuntimeError if elements of the state and the parameter differ in size, or if there is no shared memory.
        """
        kept = part.state.get(name)
        if kept is not None and kept[0].dtype is value.dtype:
            return kept
        place = part.place
        communicator = self._shared.communicator
        if value.dtype.itemsize != place.dtype.itemsize:
            communicator.raise_together(
                RuntimeError(
                    f"shared_parameters=True: the optimizer keeps {name} of a parameter of {place.dtype} as "
                    f"{value.dtype}; both must have the same size. Use shared_parameters=False"
                )
            )
        if (place.block, name) not in self._memories:
            memory, why = communicator.memory.common_memory(len(place.block.values.shared))
            if memory is None:
                communicator.raise_together(
                    RuntimeError(
                        f"shared_parameters=True: no shared memory for {name}, the optimizer's state: {why}"
                    )
                )
            self._memories[place.block, name] = (memory, memory.view())
        memory, view = self._memories[place.block, name]
        of_parameter = view.memory[place.first : place.end]
        whole = torch.from_numpy(of_parameter).view(value.dtype)
        piece = part.of(memory.shared, value.dtype)
        part.state[name] = (piece, place.in_shape(whole))
        return part.state[name]

    def end(self, optimizer: Optimizer, twin: Optimizer) -> None:
        """Copy the twin's options, attributes and state to `optimizer`, and publish the slices. Collective."""
        for group, stepped in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group.update({**stepped, "params": group["params"]})
        others = {**twin.__dict__}
        del others["state"], others["param_groups"]
        optimizer.__dict__.update(others)
        slices = self._slices.values()
        by_tensor: dict[Any, _Slice] = {part.tensor: part for part in slices}
        # Torch has not seen the writes to the parameters. A graph that still needs their old values must fail.
        written = [part.parameter for part in slices if part.tensor.grad is not None]
        torch.autograd.graph.increment_version(written)
        for key, state in self._state.items():
            part = by_tensor.get(key)
            if part is None:
                optimizer.state[key] = state
            else:
                self._give_state(part, state, optimizer.state[part.parameter])
        self._settling.end()

    def _give_state(self, part: _Slice, state: dict[str, Any], whole: dict[str, Any]) -> None:
        for name in whole.keys() - state.keys():
            del whole[name]
        shape = part.tensor.shape
        for name, value in state.items():
            is_slice = isinstance(value, torch.Tensor) and value.shape == shape
            if not is_slice:
                whole[name] = value
                continue
            kept = part.state.get(name)
            if kept is None or value is not kept[0]:  # new, or replaced by another tensor
                kept = self._share(part, name, value)
                kept[0].copy_(value)
                state[name] = kept[0]
            whole[name] = kept[1]
