"""The work of `Strategy.shard`: it cuts this replica's part out of arrays, by the rule of global batches."""

from __future__ import annotations

import sys
import zlib
from typing import Any

from mpistrat import arrays, nest
from mpistrat.context import current_mode, in_replica_block, require_cross_replica
from mpistrat.input.splitting import slice_bounds
from mpistrat.replicas.input_plan import Share
from mpistrat.replicas.replicas import Replicas

_SAMPLED = 256  # elements of an array, at most


def shard(replicas: Replicas, share: Share, values: Any, dim: int) -> Any:
    """Return the nest `values` with each array replaced by this replica's part of it, cut along `dim`.

    The parts are slices of the arrays, not copies. Part i has ceil(size / replicas) rows; the last parts may be short
    or empty.

    Called by: `Strategy.shard`. Sends nothing.
    Args:
        replicas: the strategy's replicas on this rank.
        share: the part of the input that this rank reads.
    Raises: ValueError if a leaf is no array with a dimension `dim`, or if sizes along `dim` differ. RuntimeError if the
        rank has several replicas, and the call is not for one of them.
    """
    piece = share.pieces[_local_replica(replicas)]
    parts = nest.map_structure(lambda leaf: _part(leaf, dim, piece, share.num_replicas), values)
    leaves = nest.flatten(values)
    sizes = [leaf.shape[dim] for leaf in leaves]
    if sizes != sizes[:1] * len(sizes):
        raise ValueError(
            f"shard divides dimension {dim} of its arrays, which must have the same size there; got {sizes}. Leave out "
            "arrays that each replica needs whole, like weights of classes. Call shard once for each other size"
        )
    replicas.given_steps.distributed = True
    if arrays.gradients_are_on() and not sys.modules["torch"].compiler.is_compiling():
        _remember(replicas, leaves, nest.flatten(parts), dim)
    return parts


def _part(leaf: Any, dim: int, piece: int, num_pieces: int) -> Any:
    """Return piece number `piece` of an array that is cut along `dim`. Raises: ValueError if `leaf` has no `dim`."""
    is_array = arrays.is_array(leaf)
    if not is_array or not -leaf.ndim <= dim < leaf.ndim:
        got = f"one of shape {list(leaf.shape)}" if is_array else f"{leaf!r:.60}"
        raise ValueError(
            f"shard takes arrays, or a nest of them, and divides their dimension {dim}; got {got}"
        )
    axis = dim % leaf.ndim
    first, end = slice_bounds(int(leaf.shape[axis]), piece, num_pieces)
    before = (slice(None),) * axis
    return leaf[(*before, slice(first, end))]


def _remember(replicas: Replicas, leaves: list[Any], parts: list[Any], dim: int) -> None:
    """Record the cuts in `ShardedArrays`, because a loss may be computed from the parts."""
    sharded = replicas.sharded
    if in_replica_block(replicas.strategy):
        sharded.count += 1
        if sharded.count == 1:
            sharded.first = _checksum(leaves)
    # An array as long as the loader's step may be noise for the step. The step then says how losses count.
    examples = replicas.given_steps.examples
    known = None if examples is None else examples[-1]
    for leaf, part in zip(leaves, parts, strict=True):
        size = int(leaf.shape[dim])
        if size != known:
            replicas.given_steps.shard()
            sharded.cuts.add((int(part.shape[dim]), size, dim))


def _checksum(leaves: list[Any]) -> int:
    """Return a checksum of up to 256 elements of each array, an int from 1 to 2**31 - 1.

    The ranks compare it, to find arrays that differ between ranks.
    """
    checksum = 0
    for leaf in leaves:
        flat = leaf.reshape(-1)
        step = len(flat) // _SAMPLED + 1
        sample = arrays.to_host(flat[::step])
        text = repr((tuple(leaf.shape), sample.tolist()))
        checksum = zlib.crc32(text.encode(), checksum)
    return checksum >> 1 or 1


def _local_replica(replicas: Replicas) -> int:
    """Return the local index of the replica that calls `shard`.

    Raises: RuntimeError if the rank has several replicas, and the call is not for one of them.
    """
    num_local = replicas.group.num_local_replicas
    mode = current_mode()
    context = None
    if mode.replicas is replicas:
        context = mode.replica_context
    else:
        require_cross_replica(replicas.strategy, "shard")
    if num_local == 1:
        return 0
    if context is None or replicas.count == 1:
        where = "outside run" if context is None else "once for all of them"
        raise RuntimeError(
            f"shard gives a replica its part, but was called {where}, and this rank has {num_local} replicas: "
            "call it in the function that run calls for each replica, or start one rank per replica"
        )
    return context.local_index
