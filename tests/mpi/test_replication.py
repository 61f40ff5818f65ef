"""replication=2: what a server makes is on the next one, too, to the last bit."""

import functools
import warnings

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.host_views import view_of
from mpistrat.compat.v1 import ParameterServerStrategy
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.parameter_server.job import job as job_module
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.messages import unpack
from mpistrat.parameter_server.rpc.channel import Channel
from mpistrat.parameter_server.rpc.segments import Mappings
from support.parameter_servers.remote_jobs import strategy_on_servers, workers_of
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
SERVERS = 2
pytestmark = [
    pytest.mark.mpi(min_size=SERVERS + 1),
    pytest.mark.filterwarnings("ignore:replication=2 is of no use here"),
]


@pytest.fixture(params=["pipes", "mpi"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "mpi":
        monkeypatch.setattr(job_module, "Channel", functools.partial(Channel, pipes=False))
    return request.param


def made(**keywords):
    return strategy_on_servers(
        lambda: ParameterServerStrategy(num_ps=SERVERS, replication=2, **keywords)
    )


def copies(strategy, address):
    """The array on each of the servers that have it."""
    client = strategy.extended.job.client
    servers = client.routes.copies_of(address.server)
    assert len(set(servers)) == 2
    body = address.key, None
    replies = [client.rpc.call(server, messages.PULL, body) for server in servers]
    return [unpack(reply.wait(), Mappings()) for reply in replies]


def addresses_of(strategy):
    return list(strategy.extended.job.client.used.values())


def assert_alike(strategy):
    """To be called last: who asks the second server tells it that the first has died."""
    workers_of(strategy).Barrier()
    for address in addresses_of(strategy):
        first, second = copies(strategy, address)
        assert np.array_equal(view_of(first), view_of(second)), address.name
    workers_of(strategy).Barrier()


def states_of_both(strategy):
    """By array, the state of the first optimizer, once both copies are seen to be alike."""
    client = strategy.extended.job.client
    states = []
    for address in addresses_of(strategy):
        first, second = (
            client.rpc.call(server, messages.OPTIMIZER_STATE, (0, address.key)).wait()
            for server in client.routes.copies_of(address.server)
        )
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first), address.name
        states.append(first)
    return states


def test_every_update_is_made_on_both(way) -> None:
    with made(variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        mine = strategy.extended.job.roles.task_id + 1
        with strategy.scope():
            large = ms.Variable(np.linspace(0, 1, 90_000).reshape(300, 300), name="large")
            small = ms.Variable(torch.ones(5, dtype=torch.bfloat16), name="small")
            number = ms.Variable(0, name="number")
        for _ in range(5):
            large.assign_add(np.full((300, 300), 0.1 * mine))
            rows = ms.IndexedSlices(np.full((2, 300), 1.1), np.array([0, 299]))
            large.scatter_mul(rows)
            large.scatter_add(rows)
            small.assign_add(torch.full((5,), 0.3, dtype=torch.bfloat16))
            number.assign_add(mine)
        with pytest.raises(ms.errors.InvalidArgumentError):
            number.assign_add(np.ones(3))
        workers_of(strategy).Barrier()
        total = sum(range(1, workers_of(strategy).size + 1))
        assert number.numpy() == 5 * total
        assert_alike(strategy)


def test_first_values_are_on_both(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        with strategy.scope():
            ms.Variable(np.linspace(0, 1, 90_000), name="large")
            ms.Variable(torch.full((5,), 0.3, dtype=torch.bfloat16), name="small")
        assert_alike(strategy)


@pytest.mark.parametrize("max_staleness", [None, 0, 2])
def test_an_optimizers_state_is_on_both(way, max_staleness) -> None:
    with made(max_staleness=max_staleness, gradients="mean") as strategy:
        if strategy is None:
            return
        torch.manual_seed(0)
        with strategy.scope():
            model = torch.nn.Linear(40, 30)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(WORLD.rank)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=data)).square().mean().backward()
            optimizer.step()

        for _ in range(4):
            strategy.run(step)
        assert_alike(strategy)
        for state in states_of_both(strategy):
            assert state.keys() >= {"exp_avg", "exp_avg_sq", "step"}
            assert state["exp_avg"].any()


def test_what_is_loaded_is_on_both(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        with strategy.scope():
            model = torch.nn.Linear(40, 30)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()

        strategy.run(step)
        workers_of(strategy).Barrier()
        if strategy.extended.job.roles.task_id == 0:
            state = optimizer.state_dict()
            for state_of_parameter in state["state"].values():
                state_of_parameter["momentum_buffer"] = torch.full_like(
                    state_of_parameter["momentum_buffer"], 100.0
                )
            optimizer.load_state_dict(state)
            strategy.run(step)  # brings it there
        workers_of(strategy).Barrier()
        for state in states_of_both(strategy):
            assert (state["momentum_buffer"] >= 90.0).all()


@pytest.mark.parametrize("wrong", [0, 3, True, "2", None, 2.0, np.ones(2)])
def test_no_number_of_copies(wrong) -> None:
    for strategy in (ParameterServerStrategy, ms.ParameterServerStrategy):
        with pytest.raises(ValueError, match=r"replication must be .* 1 or 2, got"):
            strategy(num_ps=1, replication=wrong)


def test_one_server_is_too_few() -> None:
    errors = errors_of_ranks(lambda: ParameterServerStrategy(num_ps=1, replication=2))
    assert all(
        "replication=2 needs as many parameter servers" in message for _, message, _ in errors
    ), errors


def test_all_ranks_need_the_same() -> None:
    errors = errors_of_ranks(
        lambda: ParameterServerStrategy(num_ps=SERVERS, replication=1 + (WORLD.rank == 0))
    )
    assert all("the ranks make different strategies" in message for _, message, _ in errors), errors


@pytest.mark.filterwarnings("always:replication=2 is of no use here")
def test_where_a_death_ends_the_job_one_rank_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with made() as strategy:
            if strategy is not None:
                workers_of(strategy).Barrier()
    messages = [
        str(warning.message)
        for warning in caught
        if "replication=2 is of no use" in str(warning.message)
    ]
    everybody = WORLD.allgather(messages)
    assert sum(map(len, everybody)) == 1
    assert len(everybody[0]) == 1
