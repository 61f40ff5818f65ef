"""TensorFlow's ParameterServerStrategy on loopback: a chief, a worker and a server, three processes of this machine.

benchmarks/parameter_server.py starts it and compares. Each line of the input is a request, {"work": NAME, "nbytes":
NUMBER, "steps": NUMBER}, whose answer is {"seconds": NUMBER}, or without steps {"wrong": BOOLEAN}. The first line of
the output says that it is ready, {"version": TEXT}, or why it is not, {"left_out": TEXT}. The input's end is its end.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

tf: Any = None  # imported by the processes that this file is the program of

JOBS = ("chief", "worker", "ps")
# In a step of "sparse", TOUCHED rows of a table are pulled and pushed.
ROWS = 1_000_000
WIDTH = 64
TOUCHED = 1_000

IsWrong = Callable[[int], bool]  # whether the result of so many steps is wrong
# What is scheduled, with which arguments, and how it is checked.
Work = tuple[Callable[..., Any], tuple[Any, ...], IsWrong]


def dense(coordinator: Any, nbytes: int) -> Work:
    """Pull a float32 variable of `nbytes`, and push as much, which the worker has, to be added."""
    count = nbytes // 4
    with coordinator.strategy.scope():
        variable = tf.Variable(lambda: tf.zeros([count]))

    def ones() -> Any:
        return tf.data.Dataset.from_tensors(tf.ones([count])).repeat()

    @tf.function
    def step(deltas: Any) -> Any:
        value = variable.read_value()
        variable.assign_add(next(deltas))
        return value[0]

    def wrong(steps: int) -> bool:
        return bool(tf.reduce_any(variable.read_value() != float(steps)))

    return step, (iter(coordinator.create_per_worker_dataset(ones)),), wrong


def sparse(coordinator: Any, _: int) -> Work:
    """Pull rows of a table, and push as many, to be subtracted."""
    indices = np.random.default_rng(0).choice(ROWS, TOUCHED, replace=False)
    with coordinator.strategy.scope():
        table = tf.Variable(lambda: tf.zeros([ROWS, WIDTH]))

    def batches() -> Any:
        batch = (indices, tf.ones([TOUCHED, WIDTH]))
        return tf.data.Dataset.from_tensors(batch).repeat()

    @tf.function
    def step(batches: Any) -> Any:
        rows, deltas = next(batches)
        value = table.sparse_read(rows)
        table.scatter_sub(tf.IndexedSlices(deltas, rows))
        return value[0, 0]

    def wrong(steps: int) -> bool:
        there = table.read_value().numpy()
        right = bool((there[indices] == -float(steps)).all())
        return not right or int(np.count_nonzero(there)) != TOUCHED * WIDTH

    return step, (iter(coordinator.create_per_worker_dataset(batches)),), wrong


def empty(coordinator: Any, _: int) -> Work:
    @tf.function
    def nothing() -> None:
        pass

    return nothing, (), lambda steps: False


WORKS = {"dense": dense, "sparse": sparse, "empty": empty}


def start() -> tuple[Any, list[subprocess.Popen[bytes]]]:
    """The coordinator, and the other two processes, which end with their input."""
    probes = [socket.socket() for _ in JOBS]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    cluster = {job: [address] for job, address in zip(JOBS, addresses, strict=True)}
    task = {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    commands = [[sys.executable, __file__, job] for job in JOBS[1:]]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return tf.distribute.coordinator.ClusterCoordinator(strategy), others


def serve(job: str) -> None:
    """The worker's and the server's process."""
    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    server = tf.distribute.Server(cluster, job_name=job, task_index=0, protocol="grpc")
    sys.stdin.read()
    del server
    os._exit(0)  # it cannot be stopped


def seconds_of(coordinator: Any, work: Work, steps: int) -> float:
    """What so many steps take, scheduled at once."""
    step, arguments, _ = work
    started = time.perf_counter()
    for _ in range(steps):
        coordinator.schedule(step, args=arguments)
    coordinator.join()
    return time.perf_counter() - started


def answer_requests(coordinator: Any) -> None:
    works: dict[tuple[str, int], Work] = {}
    taken: dict[tuple[str, int], int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["work"]
        nbytes = request["nbytes"]
        steps = request["steps"]
        which = (name, nbytes)
        if which not in works:
            works[which] = WORKS[name](coordinator, nbytes)
            taken[which] = 0
        answer: dict[str, Any]
        if steps:
            answer = {"seconds": seconds_of(coordinator, works[which], steps)}
            taken[which] += steps
        else:
            _, _, wrong = works[which]
            answer = {"wrong": wrong(taken[which])}
        print(json.dumps(answer), flush=True)


def main() -> None:
    global tf
    try:
        import tensorflow as tf
    except ImportError:
        print(json.dumps({"left_out": "not installed"}), flush=True)
        return
    if len(sys.argv) > 1:
        serve(sys.argv[1])
    coordinator, others = start()
    print(json.dumps({"version": tf.__version__}), flush=True)
    try:
        answer_requests(coordinator)
    finally:
        for other in others:
            other.communicate()
    os._exit(0)  # the coordinator's threads look for their worker


if __name__ == "__main__":
    main()
