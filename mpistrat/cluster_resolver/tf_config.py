"""A resolver for the cluster in the variable TF_CONFIG."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec

# {"cluster": {"worker": ["n1:8888", "n2:8888"]}, "task": {"type": "worker", "index": 1},
#  "rpc_layer": "grpc", "session_master": "n1:8888"}; each key may be missing
TF_CONFIG = "TF_CONFIG"


class TFConfigClusterResolver(ClusterResolver):
    """Finds the tasks in the environment variable TF_CONFIG, a JSON text. Every call reads the variable again.

    Args:
        task_type, task_id, rpc_layer: are used instead of the values in TF_CONFIG; None for TF_CONFIG's.
        environ: a mapping to read instead of os.environ.
    Raises: the methods raise ValueError (or its subclass json.JSONDecodeError) if TF_CONFIG describes no cluster.

    Example:
        >>> cluster = '{"cluster": {"worker": ["n1:8888", "n2:8888"]}, "task": {"type": "worker", "index": 1}}'
        >>> resolver = ms.cluster_resolver.TFConfigClusterResolver(environ={"TF_CONFIG": cluster})
        >>> resolver.cluster_spec(), resolver.master()
        (ClusterSpec({'worker': ['n1:8888', 'n2:8888']}), 'n2:8888')
    """

    launcher = "tf_config"

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        super().__init__(task_type, None, rpc_layer, environment)
        self._set("task_id", task_id)
        self._environ = environ  # None: os.environ of the process that calls, also after pickling

    def cluster_spec(self) -> ClusterSpec:
        cluster = self._config().get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{TF_CONFIG}: bad "cluster": {error}') from None

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this task.

        Returns: an address such as "grpc://n1:8888". If TF_CONFIG has "session_master", its value, unchanged. '' if the
            cluster has fewer than two tasks.
        Raises: ValueError if the task is not in the cluster, or if neither the arguments nor the resolver name a task.
        """
        session_master = self._config().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        match spec.jobs:
            case []:
                return ""
            case [job] if len(spec.job_tasks(job)) == 1:
                return ""
        address = super().master(task_type, task_id, rpc_layer)
        if not address:
            tasks = sum(spec.num_tasks(job) for job in spec.jobs)
            raise ValueError(
                f"{TF_CONFIG} names {tasks} tasks and not which of them this process is: "
                f'give "task": {{"type": …, "index": …}}, or task_type and task_id'
            )
        return address

    def _get(self, name: str) -> Any:
        value = self._values[name]
        if value is None:
            key = {"task_type": "type", "task_id": "index"}.get(name)
            value = self._task().get(key) if key else self._config().get(name)
        return _read(name, value)

    def _set(self, name: str, value: Any) -> None:
        super()._set(name, _read(name, value))

    def _config(self) -> dict[str, Any]:
        environ = os.environ if self._environ is None else self._environ
        return parse_tf_config(environ.get(TF_CONFIG, "{}"))

    def _task(self) -> dict[str, Any]:
        task = self._config().get("task", {})
        if not isinstance(task, dict):
            raise ValueError(
                f'{TF_CONFIG}: "task" must be {{"type": …, "index": …}}, got {task!r:.80}'
            )
        return task


def parse_tf_config(text: str) -> dict[str, Any]:
    """Return the JSON object in the text of TF_CONFIG as a dict.

    Raises: ValueError, and no other error, if `text` is not the JSON of an object, if it is nested too deeply, or if a
        key is given twice.
    """
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{TF_CONFIG} is nested too deeply: {text[:80]!r}…") from None
    except json.JSONDecodeError as error:
        message = f"{TF_CONFIG}={text!r:.80} is no JSON: {error.msg}"
        raise json.JSONDecodeError(message, error.doc, error.pos) from None
    except ValueError as error:  # a key is given twice, or a number has too many digits for Python
        what = error if "twice" in str(error) else "holds a number of too many digits"
        raise ValueError(f"{TF_CONFIG}={text!r:.80}: {what}") from None
    if not isinstance(config, dict):
        raise ValueError(
            f'{TF_CONFIG} must be a JSON object such as {{"cluster": {{"worker": ["n1:8888"]}}}}, got {text[:80]!r}'
        )
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found


def _read(name: str, value: Any) -> Any:
    """Return a resolver's value as a str, and its `task_id` as an int; None for None.

    Raises: ValueError if a `task_id` is no number from 0 on.
    """
    if value is None:
        return None
    if name != "task_id":
        return str(value)
    if not re.fullmatch(r"[0-9]{1,18}", str(value)):  # True and 1.0 do not match
        raise ValueError(f"a task index must be a number from 0 on, got {value!r:.80}")
    return int(value)
