"""Each rank prints a line of JSON: its node, and its replicas under two strategies."""

import json

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver


def replica_id() -> int:
    context = ms.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def replicas_of(strategy: ms.Strategy) -> dict[str, object]:
    replicas = strategy.experimental_local_results(strategy.run(replica_id))
    return {"devices": strategy.extended.worker_devices, "replicas": replicas}


def main() -> None:
    topology = MPIClusterResolver().topology()
    one = replicas_of(ms.MultiWorkerMirroredStrategy())
    two = replicas_of(ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]))
    found = {"rank": topology.rank, "node": topology.node, "one": one, "two": two}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
