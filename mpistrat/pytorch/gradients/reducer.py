"""`backward()` inside `run`: it reduces its gradients over all replicas, and adds the result to `.grad`.

`reducing_backward` replaces `torch.autograd.backward`. At its end a replica may wait for other replicas, because it is
outside the autograd engine and on the replica's own thread, also after reentrant checkpointing. A callback of the
engine could not wait.

1. The backward moves gradients that are already reduced out of `.grad`, so that `.grad` collects only this backward's.
2. If the program has its own `cross_device_ops`, they add up the gradients of this rank's replicas.
3. The ranks agree on the parameters that any replica used (`agreement`).
4. The gradients are packed by dtype into flat buffers (`cross_device_ops.packing`) and all-reduced.
5. `.grad` becomes a view of the pack, so nothing is copied out. If step 1 moved a gradient out of `.grad`, the sum is
   added to that gradient instead.

With overlap, gradients are sent in buckets while the engine runs. On an accelerator a pack is as large as a bucket, and
a gradient is freed once it is in a pack. So memory holds the gradients and little more.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.communicators.graph_capture import is_capturing
from mpistrat.context import AnyReplicaContext, per_thread
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.ending import early_signals
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.agreement import AgreedGradients, ReplicaBackward, StepAgreement
from mpistrat.pytorch.gradients.arrivals import Arrivals
from mpistrat.pytorch.gradients.dense_sums import DenseSums
from mpistrat.pytorch.gradients.earlier_gradients import EarlierGradients
from mpistrat.pytorch.gradients.overlap import Overlap
from mpistrat.pytorch.gradients.values import sum_by_custom_ops, sum_sparse
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.replicas.torch_modules import ModuleParts
from mpistrat.torch_distributed.next_group import has_default_group
from mpistrat.trace import spans
from mpistrat.wire_formats import ShortFloats

if TYPE_CHECKING:
    from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps

# `id`s of the reducers with a `no_sync()` block around this code. A replica's thread inherits the value from the thread
# that called `run`.
_not_synchronizing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "not_synchronizing", default=frozenset()
)

_MAY_INTERLEAVE = (
    "Gradients were sent while backward() ran. If the program communicates inside backward(), and its ranks use "
    "different parameters, reduce gradients after backward(): CommunicationOptions(overlap=False)"
)


def replica_here() -> tuple[AnyReplicaContext, GradientReducer] | None:
    """Return the replica context of this thread, and the gradient reducer of its strategy.

    Called by: `reducing_backward`, and the hooks around optimizer steps.
    Returns: None outside `run` and `replica()`, before the strategy has seen a torch module, or if the strategy has
        one replica in all. The caller then does as torch does.
    """
    if not per_thread.modes:
        return None  # the default strategy is in force: it has one replica
    mode = per_thread.modes[-1]
    context = mode.replica_context
    if context is None:
        return None
    modules = context.replicas.modules.made
    if modules is None or modules.reducer.count == 1:
        return None
    return context, modules.reducer


@functools.wraps(hooks.original_backward)
def reducing_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    arguments = (tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    here = replica_here()
    # A backward inside a backward (reentrant checkpointing) is part of the outer one.
    if here is None or hooks.graph_task() >= 0:
        hooks.original_backward(*arguments)
        return
    if create_graph:
        raise RuntimeError(
            "backward(create_graph=True) inside run is not supported: .grad cannot hold the graph of a reduction "
            "over replicas. Use torch.autograd.grad(..., create_graph=True) for the inner derivative, and call "
            "backward() on the loss that contains it"
        )
    context, reducer = here
    with spans.current.range("backward"), hooks.without_compiled_autograd():
        reducer.backward(context, *arguments)


class GradientReducer:
    """Reduces the gradients of a strategy's mirrored parameters.

    Args:
        parts: the strategy's communicator, replicas, options and rule for gradients (mean or sum).
        registry: the mirrored parameters and buffers.
        slice_steps: the optimizer steps of parameters that a node's ranks share; None without `shared_parameters=True`.

    Attributes:
        parts: the argument `parts`.
        count: number of replicas on all ranks.
        steps: number of optimizer steps that this rank has taken inside `run`. A rank with another number has skipped
            a backward.
        has_reduced: whether all ranks have come to the end of a backward.
        reductions: number of backwards that have reduced gradients.
        share: this replica's weight in the global loss in the last backward; None before the first. With a mean the
            shares of all replicas add up to 1; with a sum each is 1.
        optimizers: live optimizers that have stepped inside `run`, by a number that is equal on all ranks.
        numbers: iterator of the numbers for `optimizers`, in the order of their first steps.
        slice_steps: the argument `slice_steps`.
        arrivals: notes each gradient that the autograd engine adds to `.grad`.
        packer: makes the packs (flat buffers) of gradients.
        wires: the wire format of gradients, and its residuals.
        overlap: decides whether gradients are sent while backward() runs.
    """

    def __init__(
        self, parts: ModuleParts, registry: Registry, slice_steps: SliceSteps | None = None
    ) -> None:
        self.parts = parts
        self.registry = registry
        self.slice_steps = slice_steps
        self._communicator = parts.group.communicator
        self._raising_together = self._communicator.raising_together()
        self.count = parts.group.num_replicas_in_sync
        options = parts.ops.options
        short = None if options.wire_dtype is None else ShortFloats(options.wire_dtype)
        self.wires = Wires(options.wire_format or short, registry)
        self._agreement = StepAgreement(parts, registry)
        self.packer = Packer()
        self._sums = DenseSums(parts, self.packer, self.wires)
        self.overlap = Overlap(parts, self.packer, self.wires, shares=slice_steps is not None)
        self.arrivals = Arrivals(registry)
        self._earlier = [EarlierGradients(registry) for _ in range(parts.replicas.count)]
        self._warned_of_scale = False
        self.steps = 0
        self.has_reduced = False
        self.reductions = 0
        self.share: float | None = None
        self.optimizers = weakref.WeakValueDictionary[int, torch.optim.Optimizer]()
        self.numbers = itertools.count()

    @property
    def has_local(self) -> bool:
        """Whether the first replica of this rank has gradients of `no_sync()` that are not reduced."""
        return self._earlier[0].has_local

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, backwards add to `.grad` without a reduction. Does the work of `Strategy.no_sync`."""
        token = _not_synchronizing.set(_not_synchronizing.get() | {id(self)})
        try:
            yield
        finally:
            _not_synchronizing.reset(token)

    def backward(self, context: AnyReplicaContext, tensors: Any, *arguments: Any) -> None:
        """Run the autograd engine, reduce the new gradients over all replicas, and add the result to `.grad`.

        Inside `no_sync()` the gradients are not reduced. If this raises, the reduced gradients from before the call are
        put back into `.grad`.
        Called by: `reducing_backward`, in every replica equally often, on the replica's thread.
        Args:
            context: the replica's context.
            tensors, arguments: the arguments of `torch.autograd.backward`.
        """
        step = self._set_aside(context.local_index)
        reduced = None
        replicas = self.parts.replicas
        replica = step.replica
        try:
            self._run(step, tensors, *arguments)
            if step.synchronizes and replicas.count == 1:
                (reduced,) = self._agree_and_reduce([step])
            elif step.synchronizes:
                reduced = replicas.meet(replica, self._agree_and_reduce, step)[replica]
        except BaseException as error:
            self._undo(step, error)
            raise
        self._earlier[replica].put_back(step.parameters, step.earlier, reduced)

    def _set_aside(self, replica: int) -> ReplicaBackward:
        """Begin a backward: move reduced gradients out of `.grad`, so that `.grad` collects only this backward's.

        Args: replica: number of the replica among this rank's replicas.
        Returns: the record of the backward, with the moved gradients, and the buckets to fill (None without overlap).
        Raises: RuntimeError inside `replica()` if no module is mirrored and torch has no default process group; or if
            a graph of the device is being captured.
        """
        rule = self.parts.rule
        call = f"backward() over {self.count} replicas"
        parameters = []
        some = None
        for slot in self.registry.slots:  # no comprehension: before Python 3.12 it is a call more
            parameter = slot.reference()
            parameters.append(parameter)
            if some is None:  # `parameter` is None, too, if it was garbage-collected
                some = parameter
        in_block = per_thread.modes[-1].in_block
        scale = None
        synchronizes = id(self) not in _not_synchronizing.get()
        if in_block:
            _check_mirrors(parameters, call)
            rule.default_to_mean(call)
        if synchronizes and some is not None:  # a model of sharded parameters alone needs no rule
            chosen = rule.chosen or rule.decided(call)
            if chosen == "mean":
                scale = 1.0 / self.count
            if not some.is_cpu:
                _check_not_captured(some)
        weight = self._weight(in_block)
        earlier = self._earlier[replica].set_aside(parameters)
        self._sums.spent = []
        may_leave = synchronizes and self.overlap.may_come
        buckets = self.overlap.begin(parameters, scale) if may_leave else None
        return ReplicaBackward(
            replica, parameters, in_block, synchronizes, scale, weight, earlier, buckets
        )

    def _run(self, step: ReplicaBackward, tensors: Any, *arguments: Any) -> None:
        """Run the engine on the loss times its weight, send the last buckets, and record the gradients in `step`.

        Raises: RuntimeError if parameters were changed inside backward(). The other ranks raise
            CollectiveMismatchError in their next collective.
        """
        contract = self._communicator.contract
        buckets = step.buckets
        calls = contract.calls
        with self.arrivals.watched(step) as check:
            if step.weight != 1.0:
                losses = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
                with torch.enable_grad():
                    tensors = [loss * step.weight for loss in losses]
            hooks.original_backward(tensors, *arguments)
        if buckets is not None:
            calls += buckets.calls
        step.communicated = contract.calls > calls
        if step.synchronizes:
            with self._raising_together:
                check()
                if buckets is not None:
                    step.sent = buckets.finish()
            gradients = []
            for parameter in step.parameters:
                gradients.append(getattr(parameter, "grad", None))
            step.gradients = gradients
            if self.registry.buffers:
                step.buffers = buffers.snapshot(self.registry)

    def _agree_and_reduce(self, steps: list[ReplicaBackward]) -> list[dict[int, torch.Tensor]]:
        """Reduce the gradients of this rank's replicas. Collective.

        Returns: a dict for each replica, from a parameter's slot to its reduced gradient; parameters that no replica
            used are absent.
        """
        with spans.current.range("reduce gradients"):
            if self.parts.ops.custom is not None:
                with self._raising_together:
                    sum_by_custom_ops(self.parts.ops.custom, steps)
            agreed = self._agreement.agree(steps, self.steps)
            if early_signals.kept or not self.has_reduced:
                self.parts.replicas.first_step_notice.at_step(None)
            self.has_reduced = True
            self.reductions += 1
            totals = self._reduce(steps, agreed)
            reduced = [totals]
            for _ in steps[1:]:
                clones = {slot: total.clone() for slot, total in totals.items()}
                reduced.append(clones)
            return reduced

    def _weight(self, in_block: bool) -> float:
        """Return the factor for this replica's loss, and set `share`.

        Inside `replica()`, with a mean, the factor is the replica's fraction of the examples in its loader's step,
        times the number of replicas. So losses that are means over each replica's own batch give the gradient of the
        mean over the global batch, even if the batches differ in size. Else, or if no loader gave a step, it is 1.0.
        Args: in_block: whether the backward runs inside `replica()` and not inside `run`.
        """
        steps = self.parts.replicas.given_steps
        sharded = self.parts.replicas.sharded
        is_mean = self.parts.rule.chosen == "mean"
        weight = 1.0
        weighs = in_block and is_mean
        examples = None
        if weighs or steps.iterations:
            examples = steps.begin_backward(weighs=weighs)
        if sharded.cuts:
            step_examples = examples if in_block else steps.examples
            sharded.combine(alike=is_mean and step_examples is None)
        if examples is not None:
            of_replica, of_all = examples.tolist()
            weight = of_replica * self.count / of_all
        self.share = weight / self.count if is_mean else weight
        return weight

    def check_may_be_sharded(self, name: str) -> None:
        """Check that an optimizer may step a DTensor, a parameter that is sharded over ranks.

        Rank 0 warns once if the strategy expects a global loss, because `fully_shard` averages gradients instead.
        Called by: the hook before `optimizer.step()` inside `run`.
        Args: name: the parameter's name, for messages.
        Raises: RuntimeError with `shared_parameters=True`, or if this rank has several replicas.
        """
        rule = self.parts.rule
        if rule.is_of_loss and not self._warned_of_scale:
            self._warned_of_scale = True
            warn_on_first_rank(
                self._communicator.rank,
                f"{rule}, but fully_shard averages the gradient of parameter {name}, which is sharded. Make the "
                'strategy with gradients="mean", and call backward() on the mean over this replica\'s own batch; '
                'or with gradients="sum", and call set_gradient_divide_factor(1.0) of each fully sharded module',
            )
        if self.slice_steps is not None:
            why = "shared_parameters=True keeps one copy per node of whole parameters: leave it out"
        elif self.parts.replicas.count > 1:
            why = f"this rank has {self.parts.replicas.count} replicas: start one rank per replica"
        else:
            return
        raise RuntimeError(
            f"optimizer.step() inside run: parameter {name} is sharded over ranks (a DTensor), but {why}"
        )

    def held_back(self) -> dict[str, Any]:
        """Return this rank's residuals (values that the wire format has not sent yet) for a checkpoint.

        The dict also has the number of ranks, the names of the mirrored parameters, and the state of overlap.
        `hold_back` takes such dicts. The residuals are not copied.
        """
        return {
            "ranks": self._communicator.size,
            "parameters": [slot.name for slot in self.registry.slots],
            **self.wires.state(),
            "overlap": self.overlap.state(),
        }

    def hold_back(self, some: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Replace this rank's residuals (values that the wire format has not sent yet) by the sum of saved residuals.

        If the program mirrors other parameters now, nothing is restored and rank 0 warns that the residuals are lost.
        Called by: every rank, when a checkpoint is restored.
        Args:
            some: the result of `held_back` of any rank that saved.
            states: the results of `held_back` for this rank, with the residuals to add up; may be empty.
        """
        if some["parameters"] != [slot.name for slot in self.registry.slots]:
            warn_on_first_rank(
                self._communicator.rank,
                "the values that the wire format held back of gradients are lost: this program has mirrored other "
                "parameters, or in another order, than the program that saved the checkpoint",
                UserWarning,
            )
            return
        self.wires.load(states, whole=some["ranks"] != self._communicator.size)
        self.overlap.load(some["overlap"], self.registry.parameters())

    def explain(self) -> str:
        """Return lines for people: the rule (mean or sum), overlap, and the wire format if there is one."""
        lines = [str(self.parts.rule), self.overlap.explain(), self.wires.explain()]
        return "\n".join([line for line in lines if line])

    def _reduce(
        self, steps: list[ReplicaBackward], agreed: AgreedGradients
    ) -> dict[int, torch.Tensor]:
        """Sum up the gradients that any replica has used, and average the module buffers over the replicas. Collective.

        At the end each piggyback (an object that sends words with the agreement), and the watch if a rank has sent
        samples, gets the maxima of its words.
        Args:
            steps: the backwards of this rank's replicas.
            agreed: the result of the agreement.
        Returns: the reduced gradients, by slot. Parameters that no replica used are absent.
        """
        step = steps[0]
        buckets = step.buckets
        reduced: dict[int, torch.Tensor] = {}
        if self.slice_steps is not None:  # parameters are shared by ranks of one replica each
            reduced = self.slice_steps.shared.reduce(
                agreed.dense, step.parameters, step.gradients, step.earlier, step.scale
            )
        early = {} if buckets is None else buckets.wait()
        # Gradients that were not in a bucket, and gradients that came after their parameter's bucket was sent.
        summed = {*reduced, *early} - agreed.again
        slots = sorted({*agreed.dense} - summed)
        if slots:
            following: Any = contextlib.nullcontext
            if agreed.may_follow:
                following = self._communicator.contract.following
            with following():
                reduced |= self._sums.of(slots, steps)
        for slot in early.keys() & set(agreed.dense):
            late = reduced.get(slot)
            total = early[slot]
            if late is not None:
                total.add_(late)
            reduced[slot] = total
        if self.overlap.may_come:
            self.overlap.end(step, agreed)
        if agreed.sparse:
            reduced |= sum_sparse(self.parts.ops.over_ranks, agreed.sparse, steps)
        if self.wires.has_format:
            self.wires.end_backward()
        if self.registry.buffers:
            snapshots = [backward.buffers for backward in steps]
            buffers.reduce(self.parts, self.registry.buffers, snapshots, agreed.buffers)
        for piggyback, greatest in agreed.maxima:
            piggyback.received(greatest)
        if agreed.watched.any():
            self.parts.watch.received(agreed.watched)
        return reduced

    def _undo(self, step: ReplicaBackward, error: BaseException) -> None:
        """Put earlier gradients back into `.grad`, and give up the buckets of a backward that failed by `error`.

        If `error` is a CollectiveMismatchError, and the program made collectives while buckets were sent, this adds a
        hint to its text: use `overlap=False`.
        """
        self._earlier[step.replica].undo(step.parameters, step.earlier)
        buckets = step.buckets
        step.buckets = None  # the error keeps the step
        if buckets is None:
            return
        buckets.leave()
        if step.communicated and buckets.calls and isinstance(error, CollectiveMismatchError):
            error.args = (f"{error}. {_MAY_INTERLEAVE}",)


def _check_mirrors(parameters: Sequence[Any], call: str) -> None:
    """Check that a backward inside `replica()` has gradients to combine.

    Args:
        parameters: the mirrored parameters.
        call: the call's name, for the message.
    Raises: RuntimeError if nothing is mirrored and torch has no default process group to combine gradients with.
    """
    if not parameters and not has_default_group():
        raise RuntimeError(
            f"{call} inside replica(), where no module is mirrored: each rank would train a model of its own. Call "
            "strategy.prepare(model) on every rank once the model is built. If no gradients are to be combined, call "
            "torch.autograd.grad"
        )


def _check_not_captured(parameter: torch.Tensor) -> None:
    """Raises: RuntimeError while a graph of the parameter's device is captured."""
    if is_capturing(parameter):
        raise RuntimeError(
            "backward() inside run was called while a graph of the device is captured. The ranks agree on gradients on "
            "the host, and a replay would leave that out. Capture the model alone, by "
            'torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead"), or capture backward() inside '
            "strategy.no_sync(), and give the gradients to all_reduce after each replay"
        )


def install() -> None:
    """Replace `torch.autograd.backward`, so that backwards inside `run` reduce gradients."""
    hooks.replace_backward(reducing_backward)
