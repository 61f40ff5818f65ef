"""Predicts the time of an all-reduce on other numbers of nodes: the time within a node plus the time between nodes.

The ranks of a node combine their buffers in the node's memory. Then each rank sends a slice to the other nodes. So the
seconds for S bytes on N nodes are

    t(S, N) = node(S) + between(S, N),   node(S) = alpha + beta S,
    between(S, N) = 2 ceil(log2 N) latency + 2 (N - 1) / N S byte

`node` is fitted to times of this run: one alpha and beta for buffers that fit into the caches, and another pair for
larger ones. `latency` and `byte` describe the network, for all ranks of a node together. They come from the command
line, or are fitted to times between this run's nodes by MPI's own algorithm. The model ignores that mpistrat may sum a
large buffer in pieces, because it does so only if that took at most 1.1 times as long. It knows no shared switches and
no levels of switches.
Sources: `communicators/costs/model.py`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators import Communicator
from mpistrat.communicators.costs.model import Cost, fitted, fitted_in_two, link, over_nodes
from mpistrat.options import CommunicationImplementation
from mpistrat.tools.bench import sweep
from mpistrat.tools.bench.operations import AllReduceOperation
from mpistrat.tools.bench.report import Row, aligned, oversubscription, surroundings
from mpistrat.tools.bench.rounds import UsageError, all_ranks
from mpistrat.topology import Topology

# Bytes to fit to: smaller buffers do not go by node, and larger buffers take too much memory.
SMALLEST = 1 << 16
LARGEST = 1 << 26
_FACTOR = 2
_CALLS = 15  # for each size
_FLOAT32 = np.dtype("float32")
_CELLS = ("{nodes}", "{ranks}", "{bytes}", "{predicted:.1f}", "{algbw:.2f}", "{busbw:.2f}")
_WIDTHS = (7, 7, 14, 16, 14, 14, 15, 8)  # the widths of the table's columns, in characters


def sizes_of(arguments: argparse.Namespace) -> list[int]:
    """Return the sizes to predict, in bytes: --size, or 4 bytes for each of --model-parameters; else 1, 16 and 64 MiB.

    Raises: UsageError for a size below 64 KiB, because such buffers go through MPI alone.
    """
    sizes = arguments.size or [1 << 20, 16 << 20, 64 << 20]
    if arguments.model_parameters:
        sizes = [4 * int(parameters) for parameters in arguments.model_parameters]
    if min(sizes) < SMALLEST:
        raise UsageError(
            f"{min(sizes)} bytes go through MPI alone, and the model does not cover that; give at least {SMALLEST}"
        )
    return sizes


def check(arguments: argparse.Namespace, ranks_per_node: int, num_nodes: int) -> None:
    """Raise UsageError if the arguments contradict each other, or this run cannot give the times that the model needs.

    The arguments do so if only one of --alpha-us and --gbit is given, or one has an impossible value. This run cannot
    if --ranks-per-node is more than `ranks_per_node`, the fewest ranks on a node of this run; or if --nodes asks for
    several nodes, this run is on one, and the command line describes no network.
    """
    alpha_us = arguments.alpha_us
    gbit = arguments.gbit
    if (alpha_us is None) != (gbit is None):
        raise UsageError("--alpha-us and --gbit describe one network: give both or neither")
    if gbit is not None and not (gbit > 0 and alpha_us >= 0):
        raise UsageError(f"--alpha-us must be >= 0 and --gbit > 0, got {alpha_us} and {gbit}")
    if (wanted := arguments.ranks_per_node or 0) > ranks_per_node:
        raise UsageError(
            f"--ranks-per-node {wanted}: this run has {ranks_per_node} ranks on a node, and cannot measure how "
            f"{wanted} ranks share a node's memory; start {wanted} on each node"
        )
    if max(arguments.nodes) > 1 and num_nodes == 1 and gbit is None:
        raise UsageError(
            "this run is on one node, and measures no network: give one by --alpha-us and --gbit, ask for "
            "--nodes 1, or start ranks on several nodes"
        )


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Predicts the seconds of one all-reduce on a given number of nodes.

    Attributes:
        ranks_per_node: the number of ranks on each node.
        caches: the largest buffer, in bytes, that `in_caches` describes; 0 with one rank per node.
        in_caches: the cost within a node for buffers of up to `caches` bytes: seconds per call, and per byte.
        beyond_caches: the cost within a node for buffers of more than `caches` bytes.
        latency: seconds of one message between nodes; None if no network is known.
        byte: seconds per byte that leaves a node; None if no network is known.
        network_error: the relative error of the network's fit; None if no fit was made.
    """

    ranks_per_node: int
    caches: int
    in_caches: Cost
    beyond_caches: Cost
    latency: float | None = None
    byte: float | None = None
    network_error: float | None = None

    def seconds(self, nbytes: int, nodes: int) -> float:
        """Return the predicted seconds of an all-reduce of `nbytes` bytes on `nodes` nodes.

        Raises: ValueError for several nodes, if no network is known.
        """
        cost = self.in_caches if nbytes <= self.caches else self.beyond_caches
        if nodes > 1:
            if self.latency is None or self.byte is None:
                raise ValueError(f"{nodes} nodes, and this model knows no network between them")
            cost = cost.followed_by(over_nodes(nodes, self.latency, self.byte))
        return cost.seconds(nbytes)

    def lines(self) -> list[str]:
        """Return the model as a formula, in lines of text."""
        lines = [
            f"t(S, N) = node(S) + between(S, N), for S bytes on N nodes of {self.ranks_per_node} ranks",
            f"node(S) = {_line(self.in_caches)}, up to S = {self.caches}; then",
            f"          {_line(self.beyond_caches)}",
        ]
        if self.latency is not None and self.byte is not None:
            error = self.network_error
            origin = "as given" if error is None else f"fitted within {100 * error:.0f} %"
            speed = "no matter how many bytes"
            if self.byte:
                speed = f"{8e-9 / self.byte:.3g} Gbit/s per node"
            lines.append(
                f"between(S, N) = 2 ceil(log2 N) {self.latency * 1e6:.3g} us + 2 (N - 1) / N {self.byte * 1e9:.3g} ns "
                f"S ({speed}), {origin}"
            )
        return lines


def _line(cost: Cost) -> str:
    return str(cost).replace(" per byte", " S")


def predictions(arguments: argparse.Namespace) -> tuple[CostModel, list[Row], Row]:
    """Fit the model to times of this run and predict. Called by: every rank.

    Returns: the model, a prediction for each number of nodes and each size, and the machine and software of the run.
    Raises: UsageError if arguments are wrong or this run cannot give the times that the model needs.
    """
    sizes = sizes_of(arguments)
    communicator = all_ranks()
    topology = MPIClusterResolver().topology()
    fewest = min(collections.Counter(topology.node_of_rank).values())
    check(arguments, fewest, topology.num_nodes)
    per_node = arguments.ranks_per_node or fewest
    model = _model(communicator, topology, per_node, sizes, arguments)
    measured: dict[tuple[int, int], float] = {}
    here = topology.num_nodes
    if here in arguments.nodes and 1 < communicator.size == here * per_node:
        for size in sizes:
            if size <= LARGEST:
                measured[here, size] = _p50(communicator, size)
    rows = [
        predict(model, nodes, size, measured.get((nodes, size)))
        for nodes in arguments.nodes
        for size in sizes
    ]
    return model, rows, surroundings(communicator)


def predict(model: CostModel, nodes: int, nbytes: int, measured: float | None) -> Row:
    """Return the model's prediction for an all-reduce of `nbytes` bytes on `nodes` nodes.

    Args: measured: the microseconds that this run measured for the same; None if it did not: it has another number of
        nodes or ranks, or the size is over 64 MiB.
    Returns: the row of the plan. "predicted" is in microseconds; "algbw" and "busbw" are nccl-tests' bandwidths, in 1e9
        bytes per second, from "predicted"; "off" is predicted / measured - 1, and None without `measured`.
    Raises: ValueError for several nodes, if the model knows no network.
    """
    predicted = model.seconds(nbytes, nodes) * 1e6
    ranks = nodes * model.ranks_per_node
    algbw = nbytes / predicted / 1e3 if predicted else 0.0
    return {
        "nodes": nodes,
        "ranks": ranks,
        "bytes": nbytes,
        "predicted": predicted,
        "algbw": algbw,
        "busbw": algbw * AllReduceOperation.bus_factor(ranks),
        "measured": measured,
        "off": predicted / measured - 1 if measured else None,
    }


def _model(
    communicator: Communicator,
    topology: Topology,
    per_node: int,
    wanted: Sequence[int],
    arguments: argparse.Namespace,
) -> CostModel:
    """Fit the model to times of the first `per_node` ranks of each node. Collective.

    Args: wanted: the sizes to predict, in bytes; times are taken from 64 KiB to the largest of them, at most 64 MiB.
    """
    place = topology.local_rank
    nodes = topology.num_nodes
    takes_part = place < per_node
    colour = topology.node if takes_part else nodes + topology.node
    node = communicator.split(colour)
    # MPI's own algorithm, because its cost on more nodes is known
    across = communicator.split(place).by(CommunicationImplementation.MPI)
    largest = min(LARGEST, max(*wanted, SMALLEST * _FACTOR**5))
    sizes = list(sweep.sizes(SMALLEST, largest * _FACTOR - 1, _FACTOR))  # the last is >= `largest`

    def slowest(part: Communicator, slices: int, label: str) -> list[float]:
        """Return for each of `sizes` the largest median seconds of any rank's all-reduce of `size // slices` bytes.

        Collective over all ranks; ranks that take no part only hear the result.
        """
        seconds = np.zeros(len(sizes))
        if takes_part:
            seconds[:] = [_p50(part, size // slices) * 1e-6 for size in sizes]
        return np.max(communicator.all_gather_object(seconds, label=label), axis=0).tolist()

    node_model = (0, Cost(0.0, 0.0), Cost(0.0, 0.0))
    if per_node > 1:
        node_model = fitted_in_two(sizes, slowest(node, 1, "within nodes"))
    if arguments.gbit is not None:
        return CostModel(per_node, *node_model, arguments.alpha_us * 1e-6, 8e-9 / arguments.gbit)
    if nodes == 1:
        return CostModel(per_node, *node_model)
    between = fitted(sizes, slowest(across, per_node, "between nodes"))
    return CostModel(per_node, *node_model, *link(between, nodes), between.error)


def _p50(communicator: Communicator, nbytes: int) -> Any:
    row = sweep.measure(
        AllReduceOperation, communicator, nbytes, _FLOAT32, in_window=True, calls=_CALLS
    )
    return row["p50"]


def table(model: CostModel, rows: Sequence[Row], where: Row) -> list[str]:
    """Return the model and its predictions as lines of text."""
    names = ("nodes", "ranks", "size (B)", "predicted (us)", "algbw (GB/s)", "busbw (GB/s)")
    lines = [
        "# all_reduce, of buffers in shared memory as gradients are",
        *(f"# {line}" for line in model.lines()),
        "#",
        "#" + aligned((*names, "measured (us)", "off (%)"), _WIDTHS),
    ]
    for row in rows:
        cells = [cell.format_map(row) for cell in _CELLS]
        measured = row["measured"]
        off = row["off"]
        cells.append("-" if measured is None else f"{measured:.1f}")
        cells.append("-" if off is None else f"{100 * off:+.0f}")
        lines.append(" " + aligned(cells, _WIDTHS))
    return [*lines, *(f"# {warning}" for warning in oversubscription(where))]
