"""Reduces values over ranks: values with a component per replica, and plain values, that count once per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpistrat.cross_device_ops import MpiAllReduce
from mpistrat.cross_device_ops.ordered_all_reduce import OrderedAllReduce
from mpistrat.options import CommunicationOptions
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.values import DistributedValues


class RankReducers:
    """The reducers of a group of replicas. Each combines the values of all ranks by collectives.

    Attributes:
        of_replicas: reduces values with a component per replica.
        of_plain: reduces plain values, one per rank. It is `of_replicas` itself, unless a deterministic group has
            several replicas on a rank, because then plain values are added up in another order.
    """

    def __init__(self, group: ReplicaGroup, options: CommunicationOptions) -> None:
        communicator = group.communicator
        counts = group.replicas_of_ranks
        self._communicator = communicator
        self._counts = counts
        if not group.deterministic:
            self.of_replicas = self.of_plain = MpiAllReduce(communicator, options)
            return
        self.of_replicas = self.of_plain = OrderedAllReduce(communicator, counts, options)
        if max(counts) > 1:
            self.of_plain = OrderedAllReduce(communicator, (1,) * communicator.size, options)

    def reduce_each(
        self, values: Mapping[int, Any], reduce: Callable[[MpiAllReduce, list[int]], list[Any]]
    ) -> dict[int, Any]:
        """Reduce `values`: plain values by `of_plain`, distributed values by `of_replicas`.

        Called by: every rank.
        Args: reduce: called at most once for each reducer. `reduce(reducer, keys)` returns a list: the results for the
            values with these `keys`, in their order.
        Returns: the results, by the keys of `values`.
        """
        plain = self._plain(values) if values else []
        results: dict[int, Any] = {}
        wrapped = sorted(values.keys() - plain)
        for reducer, chosen in ((self.of_replicas, wrapped), (self.of_plain, plain)):
            if chosen:
                results.update(zip(chosen, reduce(reducer, chosen), strict=True))
        return results

    def _plain(self, values: Mapping[int, Any]) -> list[int]:
        """Return the keys of plain values; [] if `of_replicas` reduces plain values, too. Called by: every rank.

        Ranks must agree on the keys. On a rank with one replica, `run` returns plain values, too; so if ranks have
        different numbers of replicas, the first rank with the most replicas decides.
        """
        if self.of_plain is self.of_replicas:
            return []
        plain = [i for i, value in values.items() if not isinstance(value, DistributedValues)]
        most = max(self._counts)
        if min(self._counts) < most:
            plain = self._communicator.broadcast_object(
                plain, root=self._counts.index(most), label="which values are plain"
            )
        return plain
