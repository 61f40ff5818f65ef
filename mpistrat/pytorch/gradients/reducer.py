"""What `backward()` reduces: each adds the reduction of its own contribution to `.grad`, once.

`torch.autograd.backward` is wrapped, once per process. Its end, unlike the callbacks of the autograd engine, is a place
where a replica may wait for another: it is outside the engine, on the thread of the replica, and after reentrant
checkpointing, too.

Before the backward, every `.grad` that is already reduced is set aside; so what is in `.grad` afterwards
is this replica's contribution. The ranks agree on which parameters were used anywhere, the
contributions of those are packed by dtype (`cross_device_ops.packing`), all-reduced, and added to what was set
aside. `.grad` then is a view of the pack: nothing is copied out. A `cross_device_ops` of the program's own adds up the
contributions of this rank's replicas first. With overlap, contributions leave in buckets
while the backward runs; what the ranks agree on afterwards says what of it counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpistrat.communicators import Reduction, reducing
from mpistrat.context import AnyStrategy, current_mode, get_replica_context
from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.errors import CollectiveMismatchError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.pytorch.gradients.buckets import Buckets
from mpistrat.pytorch.gradients.lazy_all_reduce import LazyAllReduce
from mpistrat.pytorch.gradients.overlap import Overlap
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.pytorch.unsynchronized import Unsynchronized
from mpistrat.trace import spans
from mpistrat.values import PerReplica
from mpistrat.wire_formats import ShortFloats

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.piggyback import Piggyback
    from mpistrat.pytorch.shared_parameters.shared_parameters import SharedParameters
    from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps

# How a gradient is laid out; the greatest of all replicas wins: what is dense anywhere is dense.
_SPARSE, _DENSE = 1, 2
# Dense, and accumulated once more after its bucket had left.
_AGAIN = 3
_HEADER = 4

# Ids of the reducers inside whose `no_sync()` this replica is; its thread inherits the program's.
_not_synchronizing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "not_synchronizing", default=frozenset()
)


_original = torch.autograd.backward


def install() -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls, if it is not yet."""
    if torch.autograd.backward is _original:
        torch.autograd.backward = _reducing_backward


def reducer_here() -> GradientReducer | None:
    """The reducer of the strategy whose replica runs here; None outside run or with one replica."""
    mode = current_mode()
    if mode.replica_context is None or mode.strategy.num_replicas_in_sync == 1:
        return None
    mirroring = mode.strategy.extended.modules.made
    return None if mirroring is None else mirroring.reducer


def inside_backward() -> bool:
    """Whether this thread is in a hook or a function that the autograd engine calls."""
    return torch._C._current_graph_task_id() != -1


@functools.wraps(_original)
def _reducing_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    arguments = (tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    reducer = reducer_here()
    # A backward inside a backward (reentrant checkpointing) is part of the outer one.
    if reducer is None or inside_backward():
        _original(*arguments)
        return
    if create_graph:
        raise RuntimeError(
            "backward(create_graph=True) inside run is not supported: the graph of a reduction over "
            "replicas cannot be built into .grad. Use torch.autograd.grad(..., create_graph=True) for "
            "the inner derivative, and call backward() on the loss that contains it"
        )
    with spans.current.range("backward"):
        reducer.backward(functools.partial(_original, *arguments))


class GradientReducer:
    """Reduces the gradients of a strategy's mirrored parameters.

    Attributes:
        steps: optimizer steps taken inside `run`; a rank whose count differs has skipped a backward.
        shared, slice_steps: of parameters that the ranks of a node share; None without `shared_parameters=True`.
    """

    shared: SharedParameters | None = None
    slice_steps: SliceSteps | None = None

    def __init__(self, strategy: AnyStrategy, registry: Registry, rule: str | None) -> None:
        self._strategy: Any = weakref.proxy(strategy)
        self._extended = strategy.extended
        self.registry = registry
        self._rule = rule
        options = strategy.extended.cross_replica_ops.options
        short = None if options.wire_dtype is None else ShortFloats(options.wire_dtype)
        self.wires = Wires(options.wire_format or short, registry)
        self._packer = Packer()
        self.overlap = Overlap(strategy.extended, self._packer, self.wires)
        self._sums: MpiAllReduce = strategy.extended.cross_replica_ops.over_ranks
        if strategy.extended.replicas.records_steps:
            self._sums = LazyAllReduce(
                strategy.extended.communicator, strategy.extended.replicas.sum_of_rank
            )
            self.overlap.decline("a step is recorded first, and then computed")
        self._buckets: Buckets | None = None  # while a backward runs whose gradients leave
        self._unsynchronized = [
            Unsynchronized(registry) for _ in range(strategy.extended.replicas.count)
        ]
        self._active: set[int] = set()  # local replicas inside a backward of ours
        # The last contributions, kept until the next backward takes their memory again. Freed all at once
        # they may be the top of the heap, which glibc returns to the system: page faults were a quarter of
        # a training step.
        self._spent: list[torch.Tensor] = []
        self.steps = 0
        # Those that have stepped inside `run` and are still alive, by number in the order of their first steps.
        self.optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
            weakref.WeakValueDictionary()
        )
        self._optimizers_seen = 0

    def take_note_of(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps for the first time. Every rank takes the same steps."""
        self.optimizers[self._optimizers_seen] = optimizer
        self._optimizers_seen += 1

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The work of `Strategy.no_sync`."""
        token = _not_synchronizing.set(_not_synchronizing.get() | {id(self)})
        try:
            yield
        finally:
            _not_synchronizing.reset(token)

    def backward(self, engine: Callable[[], None]) -> None:
        """Call the autograd engine, and reduce what it has added to `.grad`.

        Called by: every replica, equally often.
        """
        context = get_replica_context()
        assert context is not None
        replica = context.local_index
        synchronizes = id(self) not in _not_synchronizing.get()
        replicas = self._extended.num_replicas_in_sync
        rule = self.rule_of(f"backward() over {replicas} replicas") if synchronizes else None
        parameters = self.registry.parameters()
        unsynchronized = self._unsynchronized[replica]
        aside = unsynchronized.set_aside(parameters)
        self._spent = []
        alone = self._extended.replicas.count == 1
        buckets = None
        if rule is not None and alone:
            buckets = self.overlap.begin(parameters, self._scale(rule))
        try:
            self._active.add(replica)
            self._buckets = buckets
            try:
                engine()
            finally:
                self._buckets = None
                self._active.discard(replica)
            if rule is None:
                unsynchronized.keep(parameters, aside)
                return
            sent: frozenset[int] = frozenset()
            if buckets is not None:
                with self._extended.communicator.raising_together():
                    sent = buckets.finish()
            contributions = [None if p is None else p.grad for p in parameters]
            operands = (contributions, buffers.snapshot(self.registry), aside)
            if alone:
                reduced = self._reduce([operands], rule, buckets, sent)
            else:
                reduced = self._extended.replicas.meet(
                    replica, lambda everyone: self._reduce(everyone, rule), operands
                )
        except BaseException:
            unsynchronized.undo(parameters, aside)
            raise
        self._spent = [g for g in contributions if g is not None and g.device.type == "cpu"]
        unsynchronized.clear()
        _install(parameters, reduced[replica], aside)

    def rule_of(self, what: str) -> str:
        """Whether gradients are summed ("sum") or averaged ("mean"). Raises: RuntimeError where nothing says it."""
        if self._rule is not None:
            return self._rule
        if self._strategy.losses_are_averaged:
            return "sum"
        raise RuntimeError(
            f"{what}: are gradients to be summed or averaged? Scale the loss with "
            "mpistrat.compute_average_loss(per_example_loss, global_batch_size=...), whose gradients are summed, or "
            'make the strategy with gradients="sum" or gradients="mean" (DistributedDataParallel\'s rule)'
        )

    def _scale(self, rule: str) -> float | None:
        return 1.0 / self._extended.num_replicas_in_sync if rule == "mean" else None

    def held_back(self) -> dict[str, Any]:
        """What the wire format has held back on this rank, for `hold_back`."""
        return {
            "ranks": self._extended.communicator.size,
            "parameters": [slot.name for slot in self.registry.slots],
            **self.wires.state(),
            "overlap": self.overlap.state(),
        }

    def hold_back(self, some: Mapping[str, Any], mine: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sum of what the ranks `mine`, any number, have held back; `some` is any rank's.

        Called by: every rank.
        """
        communicator = self._extended.communicator
        if some["parameters"] != [slot.name for slot in self.registry.slots]:
            if communicator.rank == 0:
                warnings.warn(
                    "what ranks have held back of gradients is lost: this program has mirrored other parameters, "
                    "or in another order",
                    UserWarning,
                    stacklevel=2,
                )
            return
        self.wires.load(mine, whole=some["ranks"] != communicator.size)
        self.overlap.load(some["overlap"], self.registry.parameters())

    def explain(self) -> str:
        """How gradients are reduced, for people."""
        return "\n".join(filter(None, [self.overlap.explain(), self.wires.explain()]))

    def guard(self, parameter: torch.Tensor) -> None:
        """Watch for gradients that reach a mirrored parameter by a way that is not reduced."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        required = parameter.requires_grad
        parameter.requires_grad_(
            True
        )  # torch takes hooks only then; the parameter may be unfrozen later
        parameter.register_post_accumulate_grad_hook(_Guard(self))
        parameter.requires_grad_(required)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Called whenever a mirrored parameter's gradient has grown."""
        if not self._active:
            raise RuntimeError(
                "backward() outside run reached a mirrored parameter, where its gradient is not reduced "
                "over replicas; call loss.backward() inside strategy.run(step), or use "
                "torch.autograd.grad, which leaves .grad alone"
            )
        if self._buckets is not None:
            self._buckets.arrived(parameter)

    def _reduce(
        self,
        everyone: list[tuple[Any, ...]],
        rule: str,
        buckets: Buckets | None = None,
        sent: frozenset[int] = frozenset(),
    ) -> list[list[Any]]:
        """For each local replica the list of reduced gradients by slot; None where unused everywhere.

        `buckets` have left, with something in the slots `sent`: contributions are what came later.
        """
        contributions = [operands[0] for operands in everyone]
        snapshots = [operands[1] for operands in everyone]
        with spans.current.range("reduce gradients"):
            parameters, scale = self.registry.parameters(), self._scale(rule)
            if self._extended.cross_replica_ops.has_custom_ops:
                with self._extended.communicator.raising_together():
                    contributions = [self._sums_of_program(parameters, contributions)]
            used, written, maxima = self._agree(contributions, snapshots, sent)
            reduced: list[Any] = [None] * len(used)
            dense = [int(slot) for slot in np.flatnonzero(used >= _DENSE)]
            if self.shared is not None:
                (aside,) = (operands[2] for operands in everyone)  # it is for one replica per rank
                in_shared = self.shared.reduce(dense, parameters, contributions[0], aside, scale)
                for slot, view in in_shared.items():
                    reduced[slot] = view
                dense = [slot for slot in dense if slot not in in_shared]
            in_buckets = {} if buckets is None else buckets.wait()
            rest = [slot for slot in dense if slot not in in_buckets or used[slot] == _AGAIN]

            def reduction_of(some: Sequence[int]) -> Reduction:
                label = f"gradients of {len(some)} parameters{self.wires}"
                return reducing("sum", label, scale).compressed_by(self.wires.of(some))

            views = self._sums.all_reduce_packs(
                self._packer, parameters, rest, contributions, reduction_of
            )
            for slot, view in views.items():
                reduced[slot] = view
            for slot in dense:
                if slot in in_buckets:
                    early, late = in_buckets[slot], reduced[slot]
                    reduced[slot] = early if late is None else early.add_(late)
            if len(everyone) == 1:
                self.overlap.end(dense, parameters, buckets)
            for slot in map(int, np.flatnonzero(used == _SPARSE)):
                reduced[slot] = self._reduce_sparse(
                    parameters[slot], [gradients[slot] for gradients in contributions], scale
                )
            self.wires.end_backward()
            buffers.average(self._extended, self.registry.buffers, snapshots, written)
            for piggyback, greatest in maxima:
                piggyback.received(greatest)
            return [
                reduced if i == 0 else [None if r is None else r.clone() for r in reduced]
                for i in range(len(everyone))
            ]

    def _agree(
        self,
        contributions: Sequence[Sequence[Any]],
        snapshots: Sequence[buffers.Snapshot],
        sent: frozenset[int],
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[Piggyback, np.ndarray]]]:
        """What all ranks together have used, by slot; which buffers they have written; what each piggyback gets.

        Collective.

        Raises: CollectiveMismatchError when the ranks are not in the same step.
        """
        communicator = self._extended.communicator
        slots = len(contributions[0])
        piggybacks = list(self._extended.piggybacks)
        with communicator.raising_together():
            words = [piggyback.words() for piggyback in piggybacks]
        end = _HEADER + slots + buffers.FLAGS_PER_BUFFER * len(self.registry.buffers)
        flags = np.concatenate([np.zeros(end, np.int32), *words])
        flags[:_HEADER] = (self.steps, -self.steps, self._strategy.runs, -self._strategy.runs)
        for gradients in contributions:
            for slot, gradient in enumerate(gradients):
                if gradient is not None:
                    kind = _SPARSE if gradient.is_sparse else _DENSE
                    flags[_HEADER + slot] = max(kind, flags[_HEADER + slot])
        for slot in sent:
            flags[_HEADER + slot] = _AGAIN if flags[_HEADER + slot] else _DENSE
        buffers.flag_written(snapshots, flags[_HEADER + slots : end])
        communicator.all_reduce(flags, reducing("max", "gradients of mirrored parameters"))
        if flags[0] != -flags[1] or flags[2] != -flags[3]:
            counts = communicator.all_gather_object((self._strategy.runs, self.steps))
            described = ", ".join(
                f"rank {r}: run {runs}, {steps} steps" for r, (runs, steps) in enumerate(counts)
            )
            raise CollectiveMismatchError(
                f"backward() on rank {communicator.rank}: the ranks are not in the same step, counting "
                f"calls of run and optimizer steps ({described}); a rank has skipped a backward. Every "
                "rank must call run and backward() as often as the others; a loss of zero contributes "
                "nothing"
            )
        cuts = np.cumsum([end, *map(len, words)])
        maxima = [flags[cuts[i] : cuts[i + 1]] for i in range(len(piggybacks))]
        written = buffers.to_average(flags[_HEADER + slots : end])
        used = flags[_HEADER : _HEADER + slots]
        return used, written, list(zip(piggybacks, maxima, strict=True))

    def _sums_of_program(
        self, parameters: Sequence[torch.Tensor | None], contributions: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """What this rank's replicas contribute together, added up by the program's own `cross_device_ops`.

        It gets the gradients of all parameters that a replica has used in one call, as it gets values of `reduce`.
        """
        sums: list[Any] = [None] * len(parameters)
        slots, pairs = [], []
        for slot, (parameter, *gradients) in enumerate(
            zip(parameters, *contributions, strict=True)
        ):
            if parameter is not None and any(g is not None for g in gradients):
                slots.append(slot)
                pairs.append((PerReplica(_components(parameter, gradients)), parameter.detach()))
        totals = self._extended.cross_replica_ops.sum_by_custom_ops(pairs)
        for slot, total in zip(slots, totals, strict=True):
            parameter = parameters[slot]
            sums[slot] = (
                torch.sparse_coo_tensor(
                    total.indices[None], total.values, parameter.shape, check_invariants=False
                )
                if isinstance(total, IndexedSlices) and parameter is not None
                else total
            )
        return sums

    def _reduce_sparse(
        self, parameter: torch.Tensor | None, gradients: list[Any], scale: float | None
    ) -> torch.Tensor:
        """The sum of row-sparse gradients: all ranks' rows, duplicates added up in the order of replicas."""
        assert parameter is not None
        communicator = self._extended.communicator
        rows = [self._rows(parameter, gradient) for gradient in gradients]
        indices = torch.cat([i for i, _ in rows], dim=1)
        values = torch.cat([v for _, v in rows])
        all_indices = communicator.all_gather(indices.t().contiguous().cpu(), label="sparse rows")
        all_values = communicator.all_gather(values.contiguous().cpu(), label="sparse values")
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices).t().to(parameter.device),
            torch.cat(all_values).to(parameter.device),
            parameter.shape,
            check_invariants=False,
        ).coalesce()
        return total if scale is None else total * scale

    @staticmethod
    def _rows(parameter: torch.Tensor, gradient: torch.Tensor | None) -> tuple[Any, Any]:
        if gradient is None:
            empty = parameter.new_empty((0, *parameter.shape[1:]))
            return torch.empty((1, 0), dtype=torch.int64, device=parameter.device), empty
        if gradient.sparse_dim() != 1:
            gradient = gradient.to_dense().to_sparse(1)
        gradient = gradient.coalesce()
        return gradient.indices(), gradient.values()


def _components(
    parameter: torch.Tensor, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | IndexedSlices]:
    """Gradients of one parameter as the components of a value: a replica that has not used it contributes zeros."""
    if all(g is not None and g.is_sparse and g.sparse_dim() == 1 for g in gradients):
        rows = [g.coalesce() for g in gradients if g is not None]
        return [IndexedSlices(g.values(), g.indices()[0], tuple(parameter.shape)) for g in rows]
    zeros = None if None not in gradients else torch.zeros_like(parameter)
    dense = [zeros if g is None else g.to_dense() if g.is_sparse else g for g in gradients]
    return [g for g in dense if g is not None]


def _install(
    parameters: Sequence[torch.Tensor | None],
    reduced: Sequence[torch.Tensor | None],
    aside: dict[int, torch.Tensor],
) -> None:
    """Put the reduced gradients into `.grad`, added to those of earlier backwards in `aside`."""
    totals, addends = [], []
    for i, (parameter, added) in enumerate(zip(parameters, reduced, strict=True)):
        if parameter is None:
            continue
        before = aside.get(i)
        if added is None:
            parameter.grad = before
        elif before is None:
            parameter.grad = added
        elif before.is_sparse or added.is_sparse:
            parameter.grad = before + added
        else:
            parameter.grad = before
            totals.append(before)
            addends.append(added)
    if totals:
        torch._foreach_add_(totals, addends)


class _Guard:
    """A post-accumulate hook that does not keep its reducer alive."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)

    def __call__(self, parameter: torch.Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.accumulated(parameter)
