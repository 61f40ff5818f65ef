"""SlurmClusterResolver: list order, distributions, GPUs or none, and variables that contradict each other."""

import pytest

from mpistrat.cluster_resolver import SlurmClusterResolver
from mpistrat.errors import TopologyError

STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[9-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "CUDA_VISIBLE_DEVICES": "",
}


def resolver(variables=None, **arguments):
    return SlurmClusterResolver(**arguments, environ={**STEP, **(variables or {})})


def test_hosts_keep_the_order_of_the_list():
    r = resolver()
    assert r.cluster_spec().as_dict() == {"worker": ["n9:8888", "n10:8888", "n11:8888"]}
    assert (r.task_type, r.task_id, r.master()) == ("worker", 1, "grpc://n10:8888")
    t = r.topology()
    assert (t.rank, t.size, t.node_of_rank, t.hosts) == (1, 3, (0, 1, 2), ("n9", "n10", "n11"))
    assert t.launcher == "slurm"


@pytest.mark.parametrize(
    ("variables", "node_of_rank", "addresses"),
    [
        ({}, (0, 0, 0, 1, 1), "b:8888 b:8889 b:8890 a:8888 a:8889"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, (0, 1, 0, 1, 0), "b:8888 a:8888 b:8889 a:8889 b:8890"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, (0, 0, 1, 1, 0), "b:8888 b:8889 a:8888 a:8889 b:8890"),
        (
            {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"},
            (0, 0, 1, 1, 0),
            "b:8888 b:8889 a:8888 a:8889 b:8890",
        ),
        (
            {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "a,b,b,a,b"},
            (0, 1, 1, 0, 1),
            "a:8888 b:8888 b:8889 a:8889 b:8890",
        ),
    ],
)
def test_distributions(variables, node_of_rank, addresses):
    step = {
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "b,a",
        "SLURM_STEP_TASKS_PER_NODE": "3,2",
    }
    r = resolver({**step, **variables})
    assert r.topology().node_of_rank == node_of_rank
    assert r.cluster_spec().as_dict() == {"worker": addresses.split()}


def test_the_node_id_is_checked():
    assert resolver({"SLURM_NODEID": "1"}).topology().node == 1
    with pytest.raises(
        TopologyError, match="rank 1 would be on node 1 of the list, but Slurm says SLURM_NODEID=0"
    ):
        resolver({"SLURM_NODEID": "0"})


def test_jobs_take_ranks_in_name_order():
    r = resolver(jobs={"worker": 2, "ps": 1})
    assert r.get_task_info() == (None, None)
    assert r.cluster_spec().as_dict() == {"ps": ["n9:8888"], "worker": ["n10:8888", "n11:8888"]}
    assert r.get_task_info() == ("worker", 0)
    assert r.topology().size == 3


def test_a_cluster_without_gpus_needs_no_settings(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    environ = {k: v for k, v in STEP.items() if k != "CUDA_VISIBLE_DEVICES"}
    r = SlurmClusterResolver(environ=environ)
    r.cluster_spec()
    assert r.num_accelerators() == {"GPU": 0}
    assert "CUDA_VISIBLE_DEVICES" not in environ


def test_more_tasks_than_gpus_share_them():
    environ = {
        **STEP,
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    r = SlurmClusterResolver(environ=environ)
    r.cluster_spec()
    assert r.num_accelerators() == {"GPU": 0}
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("visible", "arguments", "own"),
    [
        ("0,1,2,3,4,5", {}, "2,3"),
        ("4,5,6", {}, "5"),
        ("GPU-a,GPU-b,GPU-c", {}, "GPU-b"),
        ("0", {"gpus_per_node": 3}, "1"),
    ],
)
def test_each_task_gets_its_own_gpus(visible, arguments, own):
    environ = {
        **STEP,
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "CUDA_VISIBLE_DEVICES": visible,
    }
    SlurmClusterResolver(**arguments, environ=environ).cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == own


def test_gpus_that_slurm_bound_to_tasks_stay():
    environ = {**STEP, "CUDA_VISIBLE_DEVICES": "5,6", "SLURM_GPUS_PER_TASK": "a100:2"}
    environ |= {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"}
    r = SlurmClusterResolver(environ=environ)
    r.cluster_spec()
    assert (r.num_accelerators(), environ["CUDA_VISIBLE_DEVICES"]) == ({"GPU": 2}, "5,6")


@pytest.mark.parametrize(
    ("tasks_per_node", "addresses"),
    [
        (1, "n9:8888 n10:8888 n11:8888"),
        ("1", "n9:8888 n10:8888 n11:8888"),
        ({"n11": 1, "n9": 2}, "n9:8888 n9:8889 n11:8888"),
        ({"x10": 1, "x9": 2}, "x9:8888 x9:8889 x10:8888"),
    ],
)
def test_tasks_per_node_of_the_caller(tasks_per_node, addresses):
    assert resolver(tasks_per_node=tasks_per_node).cluster_spec().as_dict() == {
        "worker": addresses.split()
    }


@pytest.mark.parametrize(
    "name",
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"],
)
def test_a_missing_variable_is_named(name):
    environ = {k: v for k, v in STEP.items() if k != name}
    with pytest.raises(TopologyError, match=f"{name} is not set.*srun"):
        SlurmClusterResolver(environ=environ)


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"SLURM_PROCID": "3"}, {}, "SLURM_PROCID=3, is not one of the step's 3 tasks"),
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID='x' is not a number"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}, "have 4 tasks, but the step has 3"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "999999999999999999(x3)"},
            {},
            "have 3 tasks, but the step has 2999",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}, "names 3 nodes, and .*=2,1 is of 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),1,2"}, {}, "names 3 nodes, and .* is of 4"),
        ({}, {"jobs": {"worker": 2}}, "have 2 tasks, but the step has 3"),
        ({}, {"jobs": {}}, "have 0 tasks"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"gpus_per_task": 2}, "need 2 GPUs, but each node has 1"),
    ],
)
def test_contradictions(variables, arguments, message):
    with pytest.raises(TopologyError, match=message):
        resolver(variables, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"jobs": {"worker": -3}}, ValueError),
        ({"jobs": ["worker"]}, TypeError),
        ({"tasks_per_node": "two"}, ValueError),
        ({"tasks_per_node": 1.5}, ValueError),
        ({"gpus_per_task": -1}, ValueError),
    ],
)
def test_bad_arguments_name_themselves(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        resolver(**arguments)


# What Slurm 22.05 sets for `srun --het-group=0,1`: two nodes with 3 tasks, then one with 2. The list is sorted.
COMPONENTS = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1,9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[9-10]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
}


@pytest.mark.parametrize(
    ("variables", "hosts_of_ranks"),
    [
        ({}, "n9 n9 n10 n1 n1"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "n9 n10 n9 n1 n1"),
        ({"SLURM_DISTRIBUTION": "plane=1"}, "n9 n10 n9 n1 n1"),
    ],
)
def test_components_of_a_heterogeneous_job_come_one_after_the_other(variables, hosts_of_ranks):
    r = resolver({**COMPONENTS, **variables})
    t = r.topology()
    assert [t.hosts[node] for node in t.node_of_rank] == hosts_of_ranks.split()


def test_a_step_in_one_component():
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0"}
    r = resolver({**COMPONENTS, **step, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert r.topology().hosts == ("n1",)


def test_components_that_are_not_told_are_an_error():
    known = {k: v for k, v in COMPONENTS.items() if "GROUP_1" not in k}
    with pytest.raises(TopologyError, match="which nodes belong to which is not told"):
        resolver(known)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURMD_NODENAME": "n11"}, "would be on n10, but Slurm says SLURMD_NODENAME=n11"),
        ({"SLURM_GTIDS": "0,1"}, r"a node with the tasks \[1\], but Slurm says SLURM_GTIDS=0,1"),
    ],
)
def test_what_slurm_says_of_this_node_is_checked(variables, message):
    assert resolver({"SLURMD_NODENAME": "n10", "SLURM_GTIDS": "1"}).topology().host == "n10"
    with pytest.raises(TopologyError, match=message):
        resolver(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_SIZE": "3", "PMI_RANK": "2"},
        {"PRTE_LAUNCHED": "1"},
    ],
)
def test_the_daemons_of_mpirun_are_no_ranks(variables):
    with pytest.raises(TopologyError, match="describe what mpirun starts ranks with"):
        resolver(variables)


def test_srun_sets_the_variables_of_pmi_too():
    assert resolver({"PMI_SIZE": "3", "PMI_RANK": "1"}).topology().rank == 1


def test_gpus_that_only_slurm_has_bound():
    """srun --gpus-per-task=1, or --gpu-bind, which set no SLURM_GPUS_PER_TASK in Slurm 22.05."""
    environ = {**STEP, "CUDA_VISIBLE_DEVICES": "2", "SLURM_GPUS_ON_NODE": "3"}
    environ |= {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"}
    r = SlurmClusterResolver(environ=environ)
    r.cluster_spec()
    assert (r.num_accelerators(), environ["CUDA_VISIBLE_DEVICES"]) == ({"GPU": 1}, "2")
