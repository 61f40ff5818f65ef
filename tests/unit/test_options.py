"""Options: values that check themselves, and how those of one call override those of a strategy."""

import dataclasses

import pytest

import mpistrat as ms
from mpistrat.experimental import CollectiveHints
from mpistrat.options import check_options

NCCL, AUTO = ms.CommunicationImplementation.NCCL, ms.CommunicationImplementation.AUTO


def test_an_implementation_has_a_name_in_any_case():
    for name in ("nccl", "NCCL", "Nccl", NCCL):
        assert ms.CommunicationOptions(implementation=name).implementation is NCCL


@pytest.mark.parametrize(
    ("other", "merged"),
    [
        (None, (8, 5.0, NCCL)),
        (ms.CommunicationOptions(), (8, 5.0, NCCL)),
        (ms.CommunicationOptions(bytes_per_pack=4), (4, 5.0, NCCL)),
        (ms.CommunicationOptions(timeout_seconds=0), (8, 0, NCCL)),
        (ms.CommunicationOptions(implementation="ring"), (8, 5.0, "RING")),
    ],
)
def test_fields_that_are_not_at_their_defaults_win(other, merged):
    options = ms.CommunicationOptions(8, 5.0, NCCL).merge(other)
    name = merged[2] if isinstance(merged[2], str) else merged[2].name
    assert (options.bytes_per_pack, options.timeout_seconds) == merged[:2]
    assert options.implementation.name == name


def test_options_cannot_be_changed():
    options = ms.CommunicationOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.bytes_per_pack = 5
    assert check_options(None) == options
    assert check_options(options) is options


def test_hints_are_options_of_old():
    assert CollectiveHints(4, 2.0) == ms.CommunicationOptions(4, 2.0)


def test_defaults_of_inputs_and_runs():
    options = ms.InputOptions()
    assert options.experimental_fetch_to_device is None
    assert options.experimental_replication_mode is ms.InputReplicationMode.PER_WORKER
    assert options.experimental_per_replica_buffer_size == 1
    assert ms.RunOptions().experimental_enable_dynamic_batch_size


def test_reductions_have_names_in_any_case():
    for name in ("sum", "SUM", "Sum", ms.ReduceOp.SUM):
        assert ms.ReduceOp.parse(name) is ms.ReduceOp.SUM
    for op in ("max", "Min", "PRODUCT"):
        assert ms.ReduceOp.parse(op).name == op.upper()
    mean = ms.ReduceOp.from_variable_aggregation(ms.VariableAggregation.MEAN)
    assert mean is ms.ReduceOp.MEAN
    for bad in ("most", " sum", "", None, 1):
        with pytest.raises(
            ValueError, match=r"reduce_op must be .*SUM, MEAN, MAX, MIN, PRODUCT; got"
        ):
            ms.ReduceOp.parse(bad)
