"""Roles of ranks: equal on all of them, and what is wrong with one is raised by all."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpistrat.cluster_resolver import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    UnionResolver,
)
from mpistrat.cluster_resolver.roles.job_roles import job_roles
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology

CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}
TASKS = [("ps", 0), ("worker", 1), ("chief", 0), ("worker", 0)]  # of ranks 0 to 3


def of_ranks(nodes, resolvers=None, num_ps=None, *, chief=True, environs=None):
    """What `job_roles` gives, or raises, on every rank; a list is of what each rank is given."""
    size = len(nodes)
    barrier = threading.Barrier(size, timeout=60)
    values = [None] * size

    def rank_of_job(rank):
        def all_gather_object(value):
            values[rank] = value
            barrier.wait()
            return list(values)

        try:
            return job_roles(
                Topology(rank, size, tuple(nodes), tuple(f"n{i}" for i in range(max(nodes) + 1))),
                all_gather_object,
                resolvers[rank] if resolvers else None,
                num_ps[rank] if isinstance(num_ps, list) else num_ps,
                chief=chief[rank] if isinstance(chief, list) else chief,
                environ=environs[rank] if environs else {},
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_of_job, range(size)))


def agreed(*args, **kwargs):
    """By task type, on all ranks."""
    everyone = of_ranks(*args, **kwargs)
    first = everyone[0]
    assert not isinstance(first, Exception), first
    for rank, roles in enumerate(everyone):
        assert (roles.rank, roles.ranks, roles.cluster_spec) == (
            rank,
            first.ranks,
            first.cluster_spec,
        )
        assert roles.ranks[roles.task_type][roles.task_id] == rank
    return first.ranks


def error_of_all(*args, **kwargs):
    """What all ranks raise alike."""
    everyone = of_ranks(*args, **kwargs)
    assert len({(type(error), str(error)) for error in everyone}) == 1, everyone
    assert isinstance(everyone[0], (ValueError, TopologyError)), everyone
    return type(everyone[0]), str(everyone[0])


def simple(cluster, tasks):
    return [SimpleClusterResolver(ClusterSpec(cluster), "", *task) for task in tasks]


def tf_config(cluster, task_type, task_id):
    task = {"type": task_type, "index": task_id}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    ("nodes", "num_ps", "ranks"),
    [
        ([0, 0, 0], 1, {"chief": (0,), "worker": (1,), "ps": (2,)}),
        ([0] * 6, 2, {"chief": (0,), "worker": (1, 2, 3), "ps": (4, 5)}),
        ([0, 0, 0, 1, 1, 1], 2, {"chief": (0,), "worker": (1, 3, 4), "ps": (2, 5)}),
        ([0, 1, 0, 1], 1, {"chief": (0,), "worker": (1, 2), "ps": (3,)}),
        ([0, 1, 2, 2, 2], 3, {"chief": (0,), "worker": (2,), "ps": (1, 3, 4)}),
    ],
)
def test_servers_are_the_last_ranks_of_each_node_in_turn(nodes, num_ps, ranks):
    assert agreed(nodes, num_ps=num_ps) == ranks


def test_without_a_chief_worker_0_leads():
    assert agreed([0, 0], num_ps=1, chief=False) == {"worker": (0,), "ps": (1,)}
    assert agreed([0, 0, 1, 1], num_ps=2, chief=False) == {"worker": (0, 2), "ps": (1, 3)}


@pytest.mark.parametrize("chief", [True, False])
def test_servers_are_spread_evenly_wherever_nodes_have_ranks(chief):
    for nodes in ([0] * 5, [0, 1] * 3, [0, 0, 0, 1, 1], [0, 1, 1, 1, 2, 2, 2]):
        for num_ps in range(1, len(nodes) - chief):
            ranks = agreed(nodes, num_ps=num_ps, chief=chief)
            assert sorted(rank for of_type in ranks.values() for rank in of_type) == list(
                range(len(nodes))
            )
            assert len(ranks["ps"]) == num_ps
            assert 0 not in ranks["ps"]
            there = Counter(nodes[1:])
            servers = Counter(nodes[rank] for rank in ranks["ps"])
            most = max(servers.values())
            assert all(servers[node] >= min(most - 1, there[node]) for node in there)


def test_addresses_are_the_nodes_names():
    roles = of_ranks([0, 0, 1, 1], num_ps=1)[3]
    assert roles.cluster_spec == ClusterSpec(
        {"chief": ["n0"], "worker": ["n0", "n1"], "ps": ["n1"]}
    )
    assert (roles.task_type, roles.task_id, roles.ranks["worker"]) == ("ps", 0, (1, 2))


@pytest.mark.parametrize(
    ("size", "num_ps", "chief", "least"), [(1, 1, True, 3), (3, 2, True, 4), (2, 2, False, 3)]
)
def test_too_few_ranks(size, num_ps, chief, least):
    kind, message = error_of_all([0] * size, num_ps=num_ps, chief=chief)
    assert kind is ValueError
    assert f"num_ps={num_ps} needs {least} ranks" in message
    assert f"but {size} were started: mpirun -n {least} " in message


@pytest.mark.parametrize("num_ps", [0, -1, True, 1.0, "2"])
def test_num_ps_is_a_number_of_servers(num_ps):
    kind, message = error_of_all([0] * 3, num_ps=num_ps)
    assert kind is ValueError
    assert f"num_ps={num_ps!r} must be the number" in message


def test_ranks_have_the_tasks_that_they_claim():
    ranks = {"chief": (2,), "worker": (3, 1), "ps": (0,)}
    assert agreed([0] * 4, simple(CLUSTER, TASKS)) == ranks
    assert agreed([0] * 4, environs=[tf_config(CLUSTER, *task) for task in TASKS]) == ranks
    unions = [UnionResolver(resolver) for resolver in simple(CLUSTER, TASKS)]
    assert agreed([0] * 4, unions) == ranks


def test_slurm_s_tasks():
    variables = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    jobs = {"chief": 1, "ps": 1, "worker": 2}
    resolvers = [
        SlurmClusterResolver(
            jobs, gpus_per_node=0, gpus_per_task=0, environ={**variables, "SLURM_PROCID": str(rank)}
        )
        for rank in range(4)
    ]
    assert agreed([0, 0, 1, 1], resolvers) == {"chief": (0,), "worker": (2, 3), "ps": (1,)}


def test_an_evaluator_and_chiefs_that_work():
    cluster = {"chief": ["c"], "ps": ["p"], "evaluator": ["e"], "worker": ["w"]}
    tasks = [("chief", 0), ("ps", 0), ("evaluator", 0), ("worker", 0)]
    ranks = {"chief": (0,), "worker": (3,), "evaluator": (2,), "ps": (1,)}
    assert agreed([0] * 4, simple(cluster, tasks)) == ranks
    assert agreed([0] * 4, simple(cluster, tasks), chief=False) == ranks
    alone = {"chief": ["c"], "ps": ["p"]}
    assert agreed([0] * 2, simple(alone, tasks[:2]), chief=False) == {"chief": (0,), "ps": (1,)}
    workers = {"worker": ["a"], "ps": ["p"]}
    claims = simple(workers, [("worker", 0), ("ps", 0)])
    assert agreed([0] * 2, claims, chief=False) == {"worker": (0,), "ps": (1,)}


def test_num_ps_counts_more_than_tf_config_and_a_resolver_of_mpi_tells_nothing():
    environs = [tf_config(CLUSTER, *task) for task in TASKS]
    servers = {"chief": (0,), "worker": (1,), "ps": (2, 3)}
    assert agreed([0] * 4, num_ps=2, environs=environs) == servers
    assert agreed([0] * 4, [MPIClusterResolver()] * 4, num_ps=2) == servers


@pytest.mark.parametrize("resolvers", [None, [MPIClusterResolver()] * 3])
def test_without_any_of_these_num_ps_is_asked_for(resolvers):
    for environ in ({}, {"TF_CONFIG": ""}, {"SLURMD_NODENAME": "n1"}):
        kind, message = error_of_all([0] * 3, resolvers, environs=[environ] * 3)
        assert kind is ValueError
        assert "give num_ps=" in message


# The first four are of the recorded cases coordinator/ctor_*.
@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        ({"ps": ["a:1"]}, (None, None), 'no worker: list one or more as "worker"'),
        ({"worker": ["a"], "ps": ["b"], "bogus": ["c"]}, (None, None), r"the jobs ['bogus']"),
        (
            {"worker": ["a"], "ps": ["b"], "chief": ["c", "d"]},
            (None, None),
            "2 tasks of type 'chief', expected at most one",
        ),
        ({"worker": ["a"], "ps": ["b"]}, ("zzz", 0), 'list the rank that coordinates the others as "chief"'),
        ({**CLUSTER, "evaluator": ["d", "e"]}, ("ps", 0), "2 tasks of type 'evaluator'"),
        ({}, (None, None), 'no parameter server: list one or more as "ps"'),
        ({"worker": ["a"], "chief": ["b"]}, ("worker", 0), "no parameter server"),
        ({"worker": ["a"], "chief": ["b"], "ps": []}, ("worker", 0), "no parameter server"),
        ({**CLUSTER, "worker": {0: "a", 2: "b"}}, ("worker", 0), "tasks of job 'worker' are [0, 2]"),
        (CLUSTER, ("zzz", 0), "rank 0: task_type='zzz' is not one of ("),
        (CLUSTER, ("evaluator", None), "rank 0: SimpleClusterResolver names task_type='evaluator'"),
        (CLUSTER, (None, None), "rank 0: SimpleClusterResolver names task_type=None"),
        (CLUSTER, (None, 0), "rank 0: SimpleClusterResolver names task_type=None"),
        (CLUSTER, ("worker", "0"), "rank 0: SimpleClusterResolver names task_type='worker' and task_id='0'"),
        (CLUSTER, ("worker", True), "task_id=True"),
        (CLUSTER, ("worker", 2), "rank 0: task_id=2 is not one of the 2 tasks of job 'worker'"),
        (CLUSTER, ("worker", -1), "rank 0: task_id=-1 is not one of"),
    ],
)  # fmt: skip
def test_clusters_and_tasks_that_cannot_be(cluster, task, message):
    kind, text = error_of_all([0] * 2, simple(cluster, [task] * 2))
    assert kind is ValueError
    assert message in text


def test_without_a_chief_a_bad_task_is_bad_too():
    kind, text = error_of_all([0] * 2, simple({"ps": ["a", "b"]}, TASKS[:2]), chief=False)
    assert kind is ValueError
    assert text.startswith("no worker")
    claims = simple({"worker": ["a"], "ps": ["b"]}, [("worker", 0), ("zzz", 0)])
    kind, text = error_of_all([0] * 2, claims, chief=False)
    assert kind is ValueError
    assert "rank 1: task_type='zzz' is not one of" in text


@pytest.mark.parametrize(
    ("cluster", "tasks", "messages"),
    [
        (
            CLUSTER,
            [("chief", 0), ("worker", 1), ("ps", 0), ("worker", 1)],
            ["ranks 1 and 3 are both worker 1", "give num_ps="],
        ),
        (CLUSTER, TASKS[:3], ["3 ranks were started", "has 4 tasks: mpirun -n 4 "]),
        (CLUSTER, [*TASKS, ("worker", 0)], ["5 ranks were started", "has 4 tasks: mpirun -n 4 "]),
        (
            CLUSTER,
            [*TASKS[:3], ("evaluator", 0)],
            ["rank 3 is evaluator 0, which is not in the cluster"],
        ),
    ],
)
def test_claims_that_are_not_the_cluster_s_tasks(cluster, tasks, messages):
    kind, text = error_of_all([0] * len(tasks), simple(cluster, tasks))
    assert kind is TopologyError
    assert all(message in text for message in messages), text


def test_ranks_that_are_given_different_things():
    kind, text = error_of_all([0] * 4, num_ps=[1, 1, 2, 1])
    assert kind is ValueError
    assert "rank 0 was given num_ps=1 with a chief, and rank 2 num_ps=2 with a chief" in text
    kind, text = error_of_all([0] * 3, num_ps=1, chief=[True, False, True])
    assert kind is ValueError
    assert "rank 0 was given num_ps=1 with a chief, and rank 1 num_ps=1 without a chief" in text
    other = {**CLUSTER, "ps": ["q:1"]}
    mixed = [*simple(CLUSTER, TASKS[:3]), *simple(other, TASKS[3:])]
    kind, text = error_of_all([0] * 4, mixed)
    assert kind is TopologyError
    assert text.startswith("rank 0 has the cluster {'chief': ['c:1']")
    assert "and rank 3 the cluster" in text
    assert "'q:1'" in text
    environs = [tf_config(CLUSTER, *task) for task in TASKS[:3]]
    kind, text = error_of_all([0] * 4, environs=[*environs, {}])
    assert kind is TopologyError
    assert "rank 3 no cluster (TF_CONFIG names none)" in text


class Failing(SimpleClusterResolver):
    def __init__(self, error):
        super().__init__(ClusterSpec(CLUSTER))
        self.error = error

    def cluster_spec(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no such host"), ValueError, "rank 2: no such host"),
        (TopologyError("not set"), TopologyError, "rank 2: not set"),
        (KeyError("worker"), TopologyError, "rank 2: KeyError: 'worker'"),
    ],
)
def test_what_one_rank_s_resolver_raises_all_raise(error, kind, text):
    resolvers = simple(CLUSTER, TASKS)
    resolvers[2] = Failing(error)
    assert error_of_all([0] * 4, resolvers) == (kind, text)
    raised = of_ranks([0] * 4, resolvers)
    assert [of_rank.__cause__ for of_rank in raised] == [None, None, error, None]


def test_what_one_rank_s_tf_config_lacks_all_raise():
    environs = [tf_config(CLUSTER, *task) for task in TASKS]
    environs[1] = {"TF_CONFIG": "{"}
    kind, text = error_of_all([0] * 4, environs=environs)
    assert kind is ValueError
    assert text.startswith("rank 1: TF_CONFIG='{' is no JSON")


def test_num_ps_and_a_cluster_are_one_too_many():
    resolvers = simple(CLUSTER, TASKS)
    kind, text = error_of_all([0] * 4, resolvers, num_ps=1)
    assert kind is ValueError
    assert text.startswith("num_ps=1 and a SimpleClusterResolver")
    kind, text = error_of_all([0] * 4, [*resolvers[:3], "cluster"])
    assert kind is ValueError
    assert text == "rank 3: cluster_resolver must be a ClusterResolver, got 'cluster'"


# What Slurm 22.05 tells the ranks of `srun --het-group=0,1`
COMPONENTS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[9-10]",
}


def on_nodes(*names, variables=COMPONENTS):
    return [{**variables, "SLURMD_NODENAME": name} for name in names]


def test_the_first_component_has_chief_and_servers():
    environs = on_nodes("n1", "n1", "n2", "n9", "n9", "n10")
    nodes = [0, 0, 1, 2, 2, 3]
    assert agreed(nodes, environs=environs) == {"chief": (0,), "worker": (3, 4, 5), "ps": (1, 2)}
    assert agreed(nodes, environs=environs, chief=False) == {
        "worker": (3, 4, 5),
        "ps": (0, 1, 2),
    }
    reordered = on_nodes("n10", "n2", "n9", "n1")  # of a communicator
    assert agreed([0, 1, 2, 3], environs=reordered) == {
        "chief": (1,),
        "worker": (0, 2),
        "ps": (3,),
    }


def test_components_after_the_second_have_workers_and_tf_config_counts_more():
    three = {**COMPONENTS, "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST_HET_GROUP_2": "n11"}
    environs = on_nodes("n1", "n2", "n9", "n11", variables=three)
    assert agreed([0, 1, 2, 3], environs=environs) == {
        "chief": (0,),
        "worker": (2, 3),
        "ps": (1,),
    }
    environments = [
        environ | tf_config(CLUSTER, *task) for environ, task in zip(environs, TASKS, strict=True)
    ]
    assert agreed([0, 1, 2, 3], environs=environments)["chief"] == (2,)


@pytest.mark.parametrize(
    ("names", "variables", "kind", "message"),
    [
        (["n9", "n9", "n10"], {}, ValueError, "all 3 ranks are in component 1 of the heterogeneous"),
        (["n1", "n9", "n10"], {}, ValueError, "component 0 of the heterogeneous Slurm job has 1 rank"),
        (["n1", "n2", "n7"], {}, ValueError, "nothing tells which ranks"),
        (["n1", "n2", "n9"], {"SLURM_JOB_NODELIST_HET_GROUP_1": "n["}, TopologyError, "GROUP_1: host list"),
    ],
)  # fmt: skip
def test_components_without_servers_or_workers(names, variables, kind, message):
    environs = on_nodes(*names, variables=COMPONENTS | variables)
    raised, text = error_of_all([0, 1, 2], environs=environs)
    assert raised is kind
    assert message in text
