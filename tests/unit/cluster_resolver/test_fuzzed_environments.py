"""Environments of all kinds: a resolver gives the right answer, or an error that names what is wrong.

What is right is told by `support.clusters.simulated_launchers`, which lays tasks out itself. An environment may be
wrong for one task only, which others cannot see; so it is for all tasks of a job together that nothing wrong may go
unnoticed: one that raises ends the job.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.cluster_resolver import SlurmClusterResolver, TFConfigClusterResolver, launcher
from mpistrat.cluster_resolver.slurm.hostlist import expand_hostlist, expand_tasks_per_node
from mpistrat.errors import TopologyError
from mpistrat.machine.cpu_share import fixed_threads, users_threads
from mpistrat.machine.gpus import visible_gpus
from mpistrat.settings import raises_on_stall, shared_bytes, stall_seconds, start_seconds
from support.clusters.simulated_launchers import (
    Environment,
    Step,
    batch_script,
    counts_by_node,
    hostlist,
    launched_by,
)

# What overwrites a variable: a typing error, another program's value, bytes that are no text.
JUNK = st.one_of(
    st.sampled_from(
        ["", " ", "0", "1", "-1", "+1", "1.0", "1e3", "0x1", "1_0", " 2", "2\n", "nan"]
    ),
    st.sampled_from(["٢", "²", "９", "\x00", "\udcff", "\N{PILE OF POO}", "9" * 5000, "-" * 5000]),
    st.sampled_from(
        ["n[", "n]", "n[1-]", "n[2-1]", "n[1", "[", "a,,b", "2(x", "2(x0)", "0(x3)", "((("]
    ),
    st.sampled_from(
        ["n[0-99999999999999999]", "1(x99999999999)", "plane", "plane=0", "cyclic,block"]
    ),
    st.text(max_size=12),
    st.integers().map(str),
)


HOSTS = [
    *("login", "head", "n.example.org"),
    *(
        f"{prefix}{i}"
        for prefix in ("n", "node-", "rack1n", "x0y")
        for i in (0, 1, 2, 8, 9, 10, 11)
    ),
    *(f"gpu{i:03d}" for i in (1, 7, 8, 9, 10, 11, 98, 99, 100, 101)),
]


@st.composite
def steps(draw: Any) -> Step:
    hosts = draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=6, unique=True))
    capacity = draw(st.lists(st.integers(0, 5), min_size=len(hosts), max_size=len(hosts)))
    if not sum(capacity):
        capacity[-1] = 1
    tasks = draw(st.integers(1, sum(capacity)))
    planes = ["plane=1", "plane=2", "plane=3"]
    step = Step.laid_out(
        hosts, capacity, tasks, draw(st.sampled_from(["block", "cyclic", *planes]))
    )
    if draw(st.booleans()):
        return step
    nodes = tuple(draw(st.permutations(step.node_of_task)))
    return Step(step.hosts, nodes, "arbitrary")


def described(step: Step, task: int, environ: Environment) -> str:
    """What the resolver says of `task`, compared with the step: "" if right, else what differs."""
    resolver = SlurmClusterResolver(environ=environ)
    topology = resolver.topology()
    cluster = resolver.cluster_spec().as_dict()
    hosts = [topology.hosts[node] for node in topology.node_of_rank]
    found = (topology.rank, topology.size, hosts, topology.local_rank, cluster)
    all_hosts = [step.host_of(t) for t in range(step.size)]
    addresses = [f"{step.host_of(t)}:{8888 + step.local_rank(t)}" for t in range(step.size)]
    right = (task, step.size, all_hosts, step.local_rank(task), {"worker": addresses})
    return "" if found == right else f"{found} instead of {right}"


def assert_clear(error: Exception, environ: Environment, *more: str) -> None:
    """It is one of the classes that are promised, and names a variable, or what it was read as."""
    assert isinstance(error, (TopologyError, ValueError)), repr(error)
    text = str(error)
    assert len(text) < 2000, text[:200]
    assert any(name in text for name in [*environ, *more]), text
    assert "invalid literal" not in text, text
    assert "Exceeds the limit" not in text, text
    text.encode("utf-8", "backslashreplace")


def slurm_steps(data: Any) -> None:
    """Every task of every layout, with what it inherits from the batch script around the step."""
    step = data.draw(steps())
    outer = batch_script(step) if data.draw(st.booleans()) else {}
    forgotten = data.draw(
        st.sets(st.sampled_from(["SLURM_GTIDS", "SLURM_NODEID", "SLURM_LOCALID"]))
    )
    for task in range(step.size):
        environ = {**outer, **step.environment(task)}
        environ |= data.draw(st.sampled_from([{}, launched_by("srun pmi2", step.size, task, step)]))
        for name in forgotten:
            environ.pop(name, None)
        assert described(step, task, environ) == ""


def assert_never_wrong(step: Step, name: str, value: str | None) -> None:
    """With the variable `name` set to `value`, or missing, on all tasks: all are right, or some task raises."""
    found = []
    for task in range(step.size):
        environ = step.environment(task)
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
        try:
            found.append(described(step, task, dict(environ)))
        except Exception as error:
            assert_clear(error, environ, name)
            return
    assert not any(found), (name, value, found)


def damaged_slurm_steps(data: Any) -> None:
    """A variable is missing, malformed, or another step's, on all tasks."""
    step, other = data.draw(steps()), data.draw(steps())
    # Those that Slurm sets for each task are what the others are checked against.
    name = data.draw(
        st.sampled_from(
            [
                *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
                *("SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_ARBITRARY_NODELIST"),
            ]
        )
    )
    value = data.draw(st.one_of(st.none(), JUNK, st.just(other.environment(0).get(name))))
    assert_never_wrong(step, name, value)


def damaged_numbers_of_tasks(data: Any) -> None:
    """What is different for each task is missing or malformed, on all."""
    step = data.draw(steps())
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_GTIDS"]
    name, value = data.draw(st.sampled_from(names)), data.draw(st.one_of(st.none(), JUNK))
    assert_never_wrong(step, name, value)


def mpirun_inside_a_step(data: Any) -> None:
    """mpirun's ranks inherit the variables of the step that mpirun, or a daemon of it, is in: those of no rank."""
    size = data.draw(st.integers(1, 6))
    step = data.draw(steps())
    inside = data.draw(st.sampled_from(["hydra", "mpirun 4", "mpirun 5", "mpirun_rsh"]))
    daemons = data.draw(st.lists(st.integers(0, step.size - 1), min_size=size, max_size=size))
    found = []
    for rank, daemon in enumerate(daemons):
        environ = {**step.environment(daemon), **launched_by(inside, size, rank)}
        try:
            topology = SlurmClusterResolver(environ=environ).topology()
        except Exception as error:
            assert_clear(error, environ)
            return
        found.append((topology.rank, topology.size))
    assert found == [(rank, size) for rank in range(size)]


def host_lists(data: Any) -> None:
    step = data.draw(steps())
    assert expand_hostlist(hostlist(step.hosts)) == list(step.hosts)
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
    assert expand_tasks_per_node(counts_by_node(counts)) == counts
    text = data.draw(JUNK)
    for expand in (expand_hostlist, expand_tasks_per_node):
        try:
            expand(text)
        except Exception as error:
            assert_clear(error, {}, "host list", "tasks per node", "expands to")


# Which launcher each library understands, and which it may, as it was built.
LIBRARIES = {
    "MPICH Version:      5.0.2\n": (("hydra", "srun pmi2"), ()),
    "MPICH Version:      4.2.0\nMPICH configure:    --with-pmix=/usr\n": (
        ("hydra", "srun pmix"),
        ("srun pmi2", "mpirun 5"),
    ),
    "Intel(R) MPI Library 2021.18 for Linux* OS\n": (("hydra", "srun pmi2"), ()),
    "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)\n": (
        ("pals", "srun pmi2"),
        ("hydra",),
    ),
    "MVAPICH2 Version      :\t2.3.7\n": (("mpirun_rsh", "srun pmi2"), ("hydra",)),
    "Open MPI v5.0.11, package: Open MPI user@localhost": (
        ("mpirun 5", "srun pmix"),
        ("mpirun 4",),
    ),
    "Open MPI v4.1.4, package: Debian OpenMPI": (
        ("mpirun 4", "srun pmix"),
        ("srun pmi2", "mpirun 5"),
    ),
    "Some Other MPI 1.0": ((), ("hydra", "mpirun 5", "srun pmix", "srun pmi2")),
}
LAUNCHERS = (
    *("hydra", "mpirun 4", "mpirun 5", "mpirun_rsh", "pals"),
    *("srun pmi2", "srun pmix", "srun none", "python"),
)
ONE_TASK = Step(("n1",), (0,), "block")


def surroundings(data: Any, start: str) -> Environment:
    """What the launcher itself inherits: nothing, a batch script's, a shell's that is a step, a daemon's."""
    if start == "pals":  # is no guest of Slurm's
        return {}
    shell = ONE_TASK.environment(0, step_id="4294967290")
    around = {
        "nothing": {},
        "batch script": batch_script(ONE_TASK),
        "interactive step": shell,
        "shell in a step with pmi2": {**shell, **launched_by("srun pmi2", 1, 0, ONE_TASK)},
        "shell in a step with pmix": {**shell, **launched_by("srun pmix", 1, 0, ONE_TASK)},
    }
    environ = dict(around[data.draw(st.sampled_from(sorted(around)))])
    if start in ("hydra", "mpirun 4", "mpirun 5"):
        daemons = Step(("n1", "n2", "n3"), (0, 1, 2), "block")
        environ |= data.draw(st.sampled_from([{}, *(daemons.environment(i) for i in range(3))]))
    return environ


def worlds(data: Any) -> None:
    """A library that understands its launcher is let through; N worlds of 1 are noticed by some rank."""
    version = data.draw(st.sampled_from(sorted(LIBRARIES)))
    start = data.draw(st.sampled_from(LAUNCHERS))
    size = 1 if start == "python" else data.draw(st.integers(1, 5))
    certain, possible = LIBRARIES[version]
    understands = start in certain or (start in possible and data.draw(st.booleans()))
    step = Step.laid_out(
        ["n1", "n2"], [3, 3], size, data.draw(st.sampled_from(["block", "cyclic"]))
    )
    around = surroundings(data, start)
    errors = []
    for rank in range(size):
        environ = {**around, **launched_by(start, size, rank, step)}
        world = (size, rank) if understands else (1, 0)
        try:
            launcher.check_library(environ, version)
            launcher.check_world(environ, version, *world)
        except TopologyError as error:
            errors.append(str(error))
            assert_clear(error, environ)
    if start in certain or start == "python":
        assert errors == [], (start, version, around, errors)
    elif size > 1 and not understands:
        assert errors, (start, version, around)


def any_claims(data: Any) -> None:
    """Whatever the variables hold, there is an answer or a TopologyError; a world of 1 that is not alone is refused."""
    rows = (*launcher.SIZE_AND_RANK, launcher.SLURM_STEP, *launcher.RANK_ONLY)
    names = [name for row in rows for name in row[:2] if name]
    names += ["SLURM_HET_SIZE", "SLURM_STEP_ID", "PRTE_LAUNCHED", "MPI4PY_LIBMPI", "PMI_FD"]
    values = st.one_of(JUNK, st.integers(0, 4).map(str))
    environ = data.draw(st.dictionaries(st.sampled_from(names), values))
    version = data.draw(st.sampled_from([*sorted(LIBRARIES), "", "\udcff"]))
    size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, size - 1))
    checks: list[Callable[[], object]] = [
        lambda: launcher.check_library(environ, version),
        lambda: launcher.check_world(environ, version, size, rank),
        lambda: launcher.check_alone(environ, "no libmpi"),
        lambda: launcher.is_first_on_node(environ),
        lambda: launcher.environment_of_children(environ),
    ]
    for check in checks:
        try:
            check()
        except TopologyError as error:
            assert_clear(error, environ)


ADDRESS = st.builds(
    "{}:{}".format, st.sampled_from(["n1", "n2", "10.0.0.1", "[fe80::1]"]), st.integers(1, 65535)
)
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5), ADDRESS
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def tf_configs(data: Any) -> None:
    """The chief, then the workers; servers and evaluators do not count as ranks."""
    workers = data.draw(st.lists(ADDRESS, min_size=1, max_size=5))
    chief = data.draw(st.lists(ADDRESS, max_size=1))
    indexed = {str(i): address for i, address in enumerate(workers)}
    cluster: dict[str, Any] = {"worker": data.draw(st.sampled_from([workers, indexed]))}
    if chief:
        cluster["chief"] = chief
    if data.draw(st.booleans()):
        cluster["ps"] = data.draw(st.lists(ADDRESS, min_size=1, max_size=2))
    trains = [("chief", 0, chief[0])] if chief else []
    trains += [("worker", i, address) for i, address in enumerate(workers)]
    for rank, (job, index, _) in enumerate(trains):
        task = {"type": job, "index": data.draw(st.sampled_from([index, str(index)]))}
        text = json.dumps({"cluster": cluster, "task": task})
        topology = TFConfigClusterResolver(environ={"TF_CONFIG": text}).topology()
        hosts = [topology.hosts[node] for node in topology.node_of_rank]
        assert (topology.rank, topology.size) == (rank, len(trains))
        assert hosts == [address.rpartition(":")[0] for _, _, address in trains]


def damaged_tf_configs(data: Any) -> None:
    """Anything in any place: a topology in which this task is what it says that it is, or an error."""
    jobs = st.sampled_from(["worker", "chief", "ps", "evaluator", "master", "", "\udcff"])
    tasks = st.one_of(
        st.lists(ADDRESS, max_size=3), st.dictionaries(JUNK, ADDRESS, max_size=3), JSON
    )
    indices = st.one_of(st.integers(-2, 4), JUNK, st.floats(), JSON)
    config = st.fixed_dictionaries(
        {},
        optional={
            "cluster": st.one_of(st.dictionaries(jobs, tasks, max_size=3), JSON),
            "task": st.one_of(st.fixed_dictionaries({"type": jobs, "index": indices}), JSON),
            "rpc_layer": JSON,
            "session_master": JSON,
        },
    )
    value = data.draw(st.one_of(config, JSON))
    text = data.draw(st.one_of(st.just(json.dumps(value)), JUNK))
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": text})
    asked: list[Callable[[], object]] = [
        resolver.cluster_spec,
        resolver.master,
        lambda: (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment),
    ]
    for ask in asked:
        try:
            ask()
        except Exception as error:
            assert_clear(error, {}, "TF_CONFIG", "task", "job", "cluster")
    try:
        topology = resolver.topology()
    except Exception as error:
        assert_clear(error, {}, "TF_CONFIG", "task", "job", "cluster", "ranks")
        return
    task = value.get("task") if text == json.dumps(value) and isinstance(value, dict) else None
    if isinstance(task, dict) and task.get("type") == "worker":
        chiefs = len(value.get("cluster", {}).get("chief", []))
        index = task.get("index")
        assert index is None or (
            not isinstance(index, (bool, float)) and int(index) + chiefs == topology.rank
        )


def indices_that_are_given_twice(data: Any) -> None:
    """JSON and dicts of indices let one address hide another."""
    twice = data.draw(
        st.sampled_from(
            [
                '{"cluster": {"worker": ["a:1", "b:1"], "worker": ["a:1"]}}',
                '{"cluster": {"worker": {"0": "a:1", "00": "b:1"}}}',
                '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0, "index": 1}}',
            ]
        )
    )
    with pytest.raises(ValueError, match=r"TF_CONFIG.*twice"):
        TFConfigClusterResolver(environ={"TF_CONFIG": twice}).topology()


def settings_of_ours(data: Any) -> None:
    """A number, or a TopologyError that names the setting."""
    read: dict[str, Callable[[Environment], Any]] = {
        "MPISTRAT_START_SECONDS": start_seconds,
        "MPISTRAT_STALL_SECONDS": stall_seconds,
        "MPISTRAT_ON_STALL": raises_on_stall,
        "MPISTRAT_SHARED_MB": shared_bytes,
        "OMP_NUM_THREADS": fixed_threads,
        "MKL_NUM_THREADS": users_threads,
        "CUDA_VISIBLE_DEVICES": visible_gpus,
    }
    name, value = data.draw(st.sampled_from(sorted(read))), data.draw(JUNK)
    try:
        found = read[name]({name: value})
    except TopologyError as error:
        assert_clear(error, {name: value})
        return
    if name.startswith("MPISTRAT_") and name != "MPISTRAT_ON_STALL":
        assert found >= 0
    if name == "OMP_NUM_THREADS":
        assert 1 <= found < 1 << 20


PROPERTIES = (
    *(slurm_steps, damaged_slurm_steps, damaged_numbers_of_tasks, mpirun_inside_a_step, host_lists),
    *(worlds, any_claims, tf_configs, damaged_tf_configs, indices_that_are_given_twice),
    settings_of_ours,
)


@pytest.mark.parametrize(
    "examples",
    [60, pytest.param(4600, marks=[pytest.mark.slow, pytest.mark.time_limit(1200)])],
)
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda function: function.__name__)
def test_environments(holds: Callable[[Any], None], examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(given(st.data())(holds))()
