"""The abstract base class of cluster resolvers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.task_roles import id_in_cluster, worker_addresses
from mpistrat.machine.devices import num_accelerators
from mpistrat.machine.gpus import visible_gpus
from mpistrat.topology import Topology


def _value(name: str) -> Any:
    """Return a property that reads a resolver's value through `_get` and writes it through `_set`.

    Subclasses override the two methods, for example to find a value that was not given.
    """
    return property(lambda self: self._get(name), lambda self, value: self._set(name, value))


class ClusterResolver(ABC):
    """Finds the tasks of a job, and this process's task among them. A task is a process with a type and a number.

    A subclass implements `cluster_spec` and `master`. The base class computes `topology` from the cluster spec and this
    task's type and id.

    Args:
        task_type, task_id: this process's task, such as "worker" and 1; None if not known.
        rpc_layer: the prefix of the addresses that `master` returns, such as "grpc"; None for no prefix.
        environment: has no effect; the property `environment` returns it.
    Attributes:
        task_type, task_id, rpc_layer: the values of Args, or those that the subclass finds; None if not known. A
            program may set them, unless the subclass raises RuntimeError.

    Example:
        >>> spec = ms.cluster_resolver.ClusterSpec({"worker": ["n1:8888", "n2:8888"]})
        >>> resolver = ms.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
        >>> resolver.cluster_spec().jobs, resolver.master("worker", 0), resolver.num_accelerators()
        (['worker'], 'n1:8888', {})
        >>> resolver.topology().rank, resolver.topology().size, resolver.environment
        (1, 2, '')
    """

    launcher = "cluster_spec"  # the name of the job's launcher in `topology`
    made_of = ""  # for messages: the argument or variable from which the package made this resolver

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = "",
    ):
        self._values: dict[str, Any] = {
            "task_type": task_type,
            "task_id": task_id,
            "rpc_layer": rpc_layer,
        }
        self._environment = environment

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current tasks of every job, and their addresses."""

    @abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this task, such as "grpc://n1:8888".

        The prefix is the argument `rpc_layer`, else the resolver's attribute `rpc_layer`; without both, there is no
        prefix.
        Returns: '' if neither the arguments nor the resolver give both a type and an id.
        Raises: ValueError if the task is not in the cluster.
        """
        if task_type is None:
            task_type = self.task_type
        if task_id is None:
            task_id = self.task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return the number of accelerators that this process sees, by kind: {"GPU": 4}; {} if it sees none.

        The base class ignores the arguments.
        """
        count = num_accelerators() or len(visible_gpus())
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str | None:
        """The environment that the resolver was made with, "" by default. The package does not use it."""
        return self._environment

    task_type: str | None = _value("task_type")
    task_id: int | None = _value("task_id")
    rpc_layer: str | None = _value("rpc_layer")

    def _get(self, name: str) -> Any:
        """Return the value of the property `name`: "task_type", "task_id" or "rpc_layer"; None if it is not known."""
        return self._values[name]

    def _set(self, name: str, value: Any) -> None:
        """Set the property `name`: "task_type", "task_id" or "rpc_layer". Subclasses may raise RuntimeError."""
        self._values[name] = value

    def topology(self) -> Topology:
        """Return the `Topology` of the tasks that train: this process's rank, and the hosts of all ranks.

        The chief, if there is one, has rank 0, and the workers follow. An evaluator does not train with the other
        tasks, so it gets a topology of one rank. An empty cluster also has one rank.
        Raises: ValueError if this task is a parameter server or not in the cluster; if `task_type` or `task_id` is None
            (both may be None in a cluster of one worker); or if the cluster is empty and `task_id` is above 0.
        """
        spec = self.cluster_spec()
        task_type = self.task_type
        task_id = self.task_id
        if not spec:
            if task_id:
                raise ValueError(
                    f"{type(self).__name__}: task_type={task_type!r:.80} and task_id={task_id} name a task "
                    "beside others, but the cluster has none; give the cluster, too"
                )
            return Topology.single()
        if task_type == "evaluator":
            return Topology.single()
        hosts = [host_of(address) for address in worker_addresses(spec)]
        task = (task_type, task_id)
        if task == (None, None) and len(hosts) == 1:
            return Topology.from_hosts(0, hosts, self.launcher)
        if None in task:
            raise ValueError(
                f"{type(self).__name__}: the cluster has {len(hosts)} workers, but task_type={task_type!r} and "
                f"task_id={task_id!r} do not say which of them this process is; give both"
            )
        rank = id_in_cluster(spec, task_type, task_id)
        return Topology.from_hosts(rank, hosts, self.launcher)


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    if rpc_layer:
        return f"{rpc_layer}://{master}"
    return master


def host_of(address: str) -> str:
    """Return `address` without its port: "n1" for "n1:8888" and for "n1", "[fe80::1]" for "[fe80::1]:80"."""
    return re.sub(r"\A(.*\]|[^:]*):\d+\Z", r"\1", address, flags=re.DOTALL)
