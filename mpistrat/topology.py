"""`Topology`: the node of each rank of a job. Every cluster resolver returns one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.errors import counted


@dataclass(frozen=True)
class Topology:
    """The node of each rank of one job, and the number of this process's rank.

    Nodes are numbered by their lowest rank, never by name: rank 0 is on node 0, the lowest rank that is not on node 0
    is on node 1, and so on. All ranks have equal topologies, except for `rank`.

    Attributes:
        rank: this process's rank, from 0 to `size - 1`.
        size: number of ranks of the job.
        node_of_rank: for each rank, in order, the number of its node.
        hosts: one host name for each node, in the order of the nodes; empty if the names are unknown.
        launcher: name of the cluster resolver that described the job: "local", "mpi", "slurm", "tf_config", ….
    Raises: ValueError if the fields contradict each other; TypeError if a field has the wrong type.

    Example:
        >>> topology = ms.Topology(rank=2, size=3, node_of_rank=(0, 0, 1), hosts=("n9", "n10"))
        >>> topology.num_nodes, topology.node, topology.host
        (2, 1, 'n10')
        >>> topology.local_rank, topology.local_size, topology.ranks_on_node(0)
        (0, 1, (0, 1))
    """

    rank: int
    size: int
    node_of_rank: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    launcher: str = "local"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", _as_int("rank", self.rank))
        object.__setattr__(self, "size", _as_int("size", self.size))
        nodes = _as_sequence("node_of_rank", self.node_of_rank)
        nodes = tuple(_as_int("node_of_rank", node) for node in nodes)
        object.__setattr__(self, "node_of_rank", nodes)
        object.__setattr__(self, "hosts", _as_sequence("hosts", self.hosts))
        if self.size < 1:
            raise ValueError(f"Topology: size={self.size}, expected at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"Topology: rank={self.rank} is not one of the {self.size} ranks 0..{self.size - 1}"
            )
        if len(nodes) != self.size:
            raise ValueError(
                f"Topology: node_of_rank names the node of {len(nodes)} ranks, expected size={self.size}"
            )
        self._check_node_numbers()
        if not all(isinstance(host, str) for host in self.hosts):
            raise TypeError(f"Topology: hosts must be names (str), got {self.hosts!r}")
        if len(self.hosts) not in (0, self.num_nodes):
            raise ValueError(
                f"Topology: {len(self.hosts)} hosts for {self.num_nodes} nodes; give one name per node "
                "or none"
            )
        if not isinstance(self.launcher, str):
            raise TypeError(f"Topology: launcher must be a str, got {self.launcher!r}")

    def _check_node_numbers(self) -> None:
        known = 0
        for rank, node in enumerate(self.node_of_rank):
            if not 0 <= node <= known:
                raise ValueError(
                    f"Topology: rank {rank} is on node {node}, but the nodes of the ranks below it are "
                    f"{self.node_of_rank[:rank]}: nodes are numbered by lowest rank, so the next new node is {known}"
                )
            known = max(known, node + 1)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return max(self.node_of_rank) + 1

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.node_of_rank[self.rank]

    @property
    def local_rank(self) -> int:
        """Position of this rank among the ranks of its node, in rank order, from 0."""
        return self.ranks_on_node(self.node).index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return self.node_of_rank.count(self.node)

    @property
    def host(self) -> str:
        """Host name of this rank's node; "" if the names are unknown."""
        if not self.hosts:
            return ""
        return self.hosts[self.node]

    def ranks_on_node(self, node: int) -> tuple[int, ...]:
        """Return the ranks that are on node number `node`, ascending.

        Raises: ValueError if the job has no such node; TypeError if `node` is no int.
        """
        if not 0 <= _as_int("node", node) < self.num_nodes:
            raise ValueError(
                f"there is no node {node}: this job has the nodes 0..{self.num_nodes - 1}"
            )
        nodes = enumerate(self.node_of_rank)
        return tuple(rank for rank, its_node in nodes if its_node == node)

    def part(self, ranks: Sequence[int]) -> Topology:
        """Return a new topology, for a smaller job that has only `ranks`, renumbered from 0 in the order of `ranks`.

        The nodes are renumbered, too, by the lowest new rank on each.   Raises: ValueError if this rank is not in
        `ranks`.

        Example:
            >>> topology = ms.Topology.from_hosts(2, ["n9", "n9", "n10"], "mpi")
            >>> topology.part([0, 2])
            Topology(rank=1, size=2, node_of_rank=(0, 1), hosts=('n9', 'n10'), launcher='mpi')
        """
        nodes = [self.node_of_rank[rank] for rank in ranks]
        kept = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        hosts: tuple[str, ...] = ()
        if self.hosts:
            hosts = tuple(self.hosts[node] for node in kept)
        renumbered = tuple(kept[node] for node in nodes)
        rank = list(ranks).index(self.rank)
        return Topology(rank, len(nodes), renumbered, hosts, self.launcher)

    @classmethod
    def single(cls) -> Topology:
        """Return the topology of a job of one rank, without host names.

        Example:
            >>> ms.Topology.single().size
            1
        """
        return cls(rank=0, size=1, node_of_rank=(0,))

    @classmethod
    def from_hosts(cls, rank: int, hosts_of_ranks: Sequence[str], launcher: str) -> Topology:
        """Return the topology of a job by the host names of its ranks: ranks with equal host names share a node.

        Args:
            rank: this process's rank.
            hosts_of_ranks: the host name of each rank: ["n9", "n10", "n9"] gives the `node_of_rank` (0, 1, 0).
            launcher: the name of the cluster resolver.
        """
        hosts_of_ranks = _as_sequence("hosts_of_ranks", hosts_of_ranks)
        lowest: dict[str, int] = {}
        leaders = [lowest.setdefault(host, i) for i, host in enumerate(hosts_of_ranks)]
        return cls.from_lowest_ranks(rank, leaders, hosts_of_ranks, launcher)

    @classmethod
    def from_lowest_ranks(
        cls, rank: int, leaders: Sequence[int], hosts_of_ranks: Sequence[str], launcher: str
    ) -> Topology:
        """Return the topology of a job, made from the lowest rank of each rank's node, as MPI tells it.

        Args:
            rank: this process's rank.
            leaders: for each rank, the lowest rank of its node: equal numbers mean the same node.
            hosts_of_ranks: the host name of each rank. A node takes the name that its lowest rank gives.
            launcher: the name of the cluster resolver.

        Example:
            >>> ms.Topology.from_lowest_ranks(1, [0, 1, 0], ["n9", "n10", "n9"], "mpi").node_of_rank
            (0, 1, 0)
        """
        number = {leader: node for node, leader in enumerate(dict.fromkeys(leaders))}
        nodes = tuple(number[leader] for leader in leaders)
        hosts = tuple(hosts_of_ranks[leader] for leader in number)
        return cls(rank, len(nodes), nodes, hosts, launcher)


def ranks_and_nodes(topology: Topology) -> str:
    """Return the size of a job as text: "4 ranks on 2 nodes"."""
    ranks = counted(topology.size, "rank")
    nodes = counted(topology.num_nodes, "node")
    return f"{ranks} on {nodes}"


def _as_int(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"Topology: {name} must be an int, got {value!r}") from None


def _as_sequence(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"Topology: {name} must have an entry for each rank or node, got {value!r}")
    return tuple(value)
