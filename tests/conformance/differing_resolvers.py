"""Expectations about resolvers that differences.toml names, computed from a case; encoded as in the recording."""

from __future__ import annotations

from typing import Any

from mpistrat.cluster_resolver.slurm.hostlist import expand_hostlist, expand_tasks_per_node

Case = dict[str, Any]


def every_reading_is_an_error(case: Case) -> Any:
    """All fields that read TF_CONFIG raise ValueError; `environment` does not read it."""
    error = {"error": "ValueError", "error_bases": [], "error_strict": True}
    expect = case["expect"]
    return {name: expect[name] if name == "environment" else error for name in expect}


def hosts_in_list_order(case: Case) -> Any:
    """The n-th address is the one Slurm gives to task n; TensorFlow sorted the hosts by name."""
    listed = _addresses(case)
    by_name = sorted(listed, key=lambda address: address.rpartition(":")[0])
    moved = dict(zip(by_name, listed, strict=True))

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            protocol, slashes, address = value.rpartition("//")
            return f"{protocol}{slashes}{moved.get(address, address)}"
        if isinstance(value, dict):
            return {name: renamed(child) for name, child in value.items()}
        return [renamed(child) for child in value] if isinstance(value, list) else value

    return renamed(case["expect"])


def tasks_without_gpus(case: Case) -> Any:
    """Tasks that get no GPU form a cluster like any others; CUDA_VISIBLE_DEVICES stays as it was."""
    addresses, env = _addresses(case), case["inputs"]["env"]
    rank = int(env["SLURM_PROCID"])
    protocol = case["inputs"]["kwargs"].get("rpc_layer", "grpc")
    return {
        "before_cluster_spec": {
            "task_type": None,
            "task_id": None,
            "task_info": [None, None],
            "master": {"ok": ""},
        },
        "cluster_spec": {"worker": addresses},
        "task_info": ["worker", rank],
        "task_type": "worker",
        "task_id": rank,
        "master()": {"ok": f"{protocol}://{addresses[rank]}"},
        "master(rpc=http)": {"ok": f"http://{addresses[rank]}"},
        "master(worker,0)": {"ok": f"{protocol}://{addresses[0]}"},
        "num_accelerators": {"GPU": 0},
        "CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES"),
        "environment": "",
        "rpc_layer": protocol,
    }


def _addresses(case: Case) -> list[str]:
    """host:port of every task of the step, in list order. Other cases hold the two parsers to account."""
    env = case["inputs"]["env"]
    hosts = expand_hostlist(env["SLURM_STEP_NODELIST"])
    counts = expand_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    port = case["inputs"]["kwargs"].get("port_base", 8888)
    tasks = zip(hosts, counts, strict=False)
    return [f"{host}:{port + k}" for host, count in tasks for k in range(count)]
