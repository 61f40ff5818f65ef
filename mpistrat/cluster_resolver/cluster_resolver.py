"""The abstract ClusterResolver: who am I, who are the others, and where do they live?"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.roles.task_roles import id_in_cluster, worker_addresses
from mpistrat.machine.devices import num_accelerators
from mpistrat.machine.gpus import visible_gpus
from mpistrat.topology import Topology


def _value(name: str) -> Any:
    """A property of a resolver, which subclasses may find, or refuse to set, in their `_get` and `_set`."""
    return property(lambda self: self._get(name), lambda self, value: self._set(name, value))


class ClusterResolver(ABC):
    """Finds the tasks of a job and this process's place among them.

    A subclass gives `cluster_spec` and `master`; `topology` follows from the cluster spec and this
    task's type and id.
    """

    launcher = "cluster_spec"  # how `topology` names what started the job
    made_of = ""  # the argument or variable of which the package has made it, for messages

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
        """The tasks of every job and their addresses, as known now."""

    @abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of this task, or of the one that is given; `rpc_layer://` in front when a layer is known.

        '' as long as nothing tells a task.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        address = self.cluster_spec().task_address(job, index)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Accelerators that this process sees, by kind: {"GPU": 4}, {} when there are none."""
        count = num_accelerators() or len(visible_gpus())
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str | None:
        return self._environment

    task_type: str | None = _value("task_type")
    task_id: int | None = _value("task_id")
    rpc_layer: str | None = _value("rpc_layer")

    def _get(self, name: str) -> Any:
        """The value of "task_type", "task_id" or "rpc_layer"; where it was not given, a subclass may find it."""
        return self._values[name]

    def _set(self, name: str, value: Any) -> None:
        """Let it be `value`."""
        self._values[name] = value

    def topology(self) -> Topology:
        """This process's place among the tasks that train: the chief, if there is one, then the workers.

        An empty cluster is one rank, and so is an evaluator, which trains with nobody.

        Raises: ValueError when this task's type or id is not known or not in the cluster, and for a
            parameter server.
        """
        spec = self.cluster_spec()
        if not spec and self.task_id:
            raise ValueError(
                f"{type(self).__name__}: task_type={self.task_type!r:.80} and task_id={self.task_id} name a task "
                "beside others, but the cluster has none; give the cluster, too"
            )
        if not spec or self.task_type == "evaluator":
            return Topology.single()
        hosts = [host_of(address) for address in worker_addresses(spec)]
        task = self.task_type, self.task_id
        if task == (None, None) and len(hosts) == 1:
            return Topology.from_hosts(0, hosts, self.launcher)
        if None in task:
            raise ValueError(
                f"{type(self).__name__}: the cluster has {len(hosts)} workers, but task_type={task[0]!r} and "
                f"task_id={task[1]!r} do not say which of them this process is; give both"
            )
        return Topology.from_hosts(id_in_cluster(spec, *task), hosts, self.launcher)


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    return f"{rpc_layer}://{master}" if rpc_layer else master


def host_of(address: str) -> str:
    """The host of "n1:8888", "10.0.0.1:80", "[fe80::1]:80" or a bare "n1"."""
    with_port = re.fullmatch(r"(.*\]|[^:]*):\d+", address, re.DOTALL)
    return with_port[1] if with_port else address
