"""Resolvers that ask a service, under MPI, which tells who is who. Each rank asks a server of its own."""

import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    MPIClusterResolver,
    TPUClusterResolver,
)
from mpistrat.cluster_resolver.tpu.pjrt import pjrt_environment, slices_of_ranks
from mpistrat.errors import NotFoundError, TopologyError
from mpistrat.topology import Topology
from support.cloud.compute_engine_api import PLACE, compute_engine
from support.cloud.google_metadata import metadata_server
from support.cloud.kubernetes_api import pod_server

WORLD = MPI.COMM_WORLD


def test_as_many_pods_as_ranks():
    pods = [(f"pod-{i}", f"10.0.0.{i}", "Running") for i in range(WORLD.size)]
    with pod_server({"job-name=tensorflow": pods}) as server:
        resolver = KubernetesClusterResolver(override_client=server.client())
        strategy = ms.MultiWorkerMirroredStrategy(resolver)
    assert strategy.num_replicas_in_sync == WORLD.size
    assert strategy.cluster_resolver is resolver


def test_other_numbers_of_pods_and_machines():
    pods = [(f"pod-{i}", f"10.0.0.{i}", "Running") for i in range(WORLD.size + 1)]
    with pod_server({"job-name=tensorflow": pods}) as server:
        resolver = KubernetesClusterResolver(override_client=server.client())
        with pytest.raises(TopologyError, match=r"Kubernetes.* lists .* start one rank per task"):
            ms.MultiWorkerMirroredStrategy(resolver)
    with compute_engine({}) as server:
        none = GCEClusterResolver(port=8470, **PLACE, **server.client_arguments())
        with pytest.raises(TopologyError, match=r"GCE.* lists 0 tasks .* start one rank per task"):
            ms.MultiWorkerMirroredStrategy(none)


def test_as_many_machines_as_ranks():
    machines = {f"vm-{i}": [f"10.0.0.{i}"] for i in range(WORLD.size)}
    with compute_engine(machines) as server:
        resolver = GCEClusterResolver(port=8470, **PLACE, **server.client_arguments())
        strategy = ms.MultiWorkerMirroredStrategy(resolver)
    assert strategy.num_replicas_in_sync == WORLD.size


def metadata(hosts: int, chips: int, worker: int) -> dict[str, str]:
    env = f"""ACCELERATOR_TYPE: 'v5litepod-{hosts * chips}'
        TPU_PROCESS_BOUNDS: '1,1,{hosts}'
        TPU_CHIPS_PER_PROCESS_BOUNDS: '1,{chips},1'
        WORKER_ID: '{worker}'"""
    endpoints = ",".join(f"w-{host}:{host}:10.0.0.{host}" for host in range(hosts))
    attributes = "instance/attributes/"
    return {f"{attributes}tpu-env": env, f"{attributes}worker-network-endpoints": endpoints}


def test_one_rank_per_chip_of_one_host():
    with metadata_server(metadata(1, WORLD.size, 0)) as server:
        resolver = TPUClusterResolver(environ=server.environ)
        strategy = ms.MultiWorkerMirroredStrategy(resolver)
        slices = slices_of_ranks(resolver.slice, WORLD.allgather)
    topology = resolver.topology()
    assert topology == MPIClusterResolver().topology()
    assert strategy.cluster_resolver is resolver
    if topology.num_nodes == 1:
        own = pjrt_environment(topology, slices)
        assert own["CLOUD_TPU_TASK_ID"] == str(WORLD.rank)
        assert own["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"


def test_one_rank_per_host_in_another_order_than_worker_ids():
    worker = WORLD.size - 1 - WORLD.rank
    with metadata_server(metadata(WORLD.size, 4, worker)) as server:
        resolver = TPUClusterResolver(environ=server.environ)
        slices = slices_of_ranks(resolver.slice, WORLD.allgather)
    hosts = [f"n{rank}" for rank in range(WORLD.size)]
    own = pjrt_environment(Topology.from_hosts(WORLD.rank, hosts, "test"), slices)
    everyone = WORLD.allgather(own)
    assert [int(environment["CLOUD_TPU_TASK_ID"]) for environment in everyone] == list(
        range(WORLD.size)
    )[::-1]
    assert len({environment["TPU_PROCESS_ADDRESSES"] for environment in everyone}) == 1
    address = own["TPU_PROCESS_ADDRESSES"].split(",")[worker]
    assert address == (f"10.0.0.{worker}:8476" if WORLD.size > 1 else "localhost:8476")


def test_hosts_that_were_given_one_worker_id():
    with metadata_server(metadata(WORLD.size, 4, 0)) as server:
        resolver = TPUClusterResolver(environ=server.environ)
        slices = slices_of_ranks(resolver.slice, WORLD.allgather)
    hosts = [f"n{rank}" for rank in range(WORLD.size)]
    topology = Topology.from_hosts(WORLD.rank, hosts, "test")
    if WORLD.size == 1:
        assert pjrt_environment(topology, slices)["CLOUD_TPU_TASK_ID"] == "0"
        return
    with pytest.raises(TopologyError, match="ranks 0 and 1 run on different nodes, and both have"):
        pjrt_environment(topology, slices)


def test_one_rank_finds_no_tpu():
    last = WORLD.size - 1
    with metadata_server(metadata(WORLD.size, 4, WORLD.rank)) as server:
        nowhere = {"GCE_METADATA_HOST": "127.0.0.1:1"}
        environ = nowhere if WORLD.rank == last else server.environ
        resolver = TPUClusterResolver(environ=environ)
        with pytest.raises(NotFoundError, match=f"^rank {last}: no TPU found: "):
            slices_of_ranks(resolver.slice, WORLD.allgather)


def test_local_on_all_ranks_or_on_none():
    local = TPUClusterResolver("local")
    assert slices_of_ranks(local.slice, WORLD.allgather) == []
    with metadata_server(metadata(WORLD.size, 4, WORLD.rank)) as server:
        resolver = TPUClusterResolver(environ=server.environ) if WORLD.rank else local
        if WORLD.size == 1:
            assert slices_of_ranks(resolver.slice, WORLD.allgather) == []
            return
        with pytest.raises(TopologyError, match=r"rank 0 was given TPUClusterResolver\('local'\)"):
            slices_of_ranks(resolver.slice, WORLD.allgather)
