"""Whether gradients are summed or averaged: who decides it, and what is said when two contradict each other."""

import warnings

import pytest
import torch

import mpistrat as ms
from mpistrat.replicas.gradient_rule import GradientRule


def test_nothing_has_decided():
    with pytest.raises(RuntimeError, match=r'^step\(\): are gradients .*gradients="mean"'):
        GradientRule().decided("step()")


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_the_argument_decides(gradients):
    rule = GradientRule(gradients)
    assert rule.decided("backward()") == gradients
    assert f"gradients='{gradients}'" in str(rule)


def test_the_first_loss_decides_and_says_where():
    rule = GradientRule()
    rule.ask_for("sum", "compute_average_loss", warn=True)
    assert rule.decided("backward()") == "sum"
    assert "compute_average_loss, called at" in str(rule)
    assert "test_gradient_rule.py" in str(rule)


def test_a_contradiction_is_told_once_and_changes_nothing():
    rule = GradientRule("mean")
    with pytest.warns(RuntimeWarning, match=r"gradients='mean'.*twice"):
        rule.ask_for("sum", "compute_average_loss", warn=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule.ask_for("sum", "compute_average_loss", warn=True)
    assert rule.decided("backward()") == "mean"


def step(requires_grad, global_batch_size=None):
    losses = torch.ones(4, requires_grad=requires_grad)
    ms.compute_average_loss(losses, global_batch_size=global_batch_size)


def test_a_loss_of_a_strategy_decides_unless_it_is_an_evaluation():
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
    rule = strategy.extended.modules.parts.rule
    strategy.run(step, args=(False,))
    assert "undecided" in str(rule)
    strategy.run(step, args=(True,))
    assert "sum of gradients" in str(rule)


@pytest.mark.parametrize(
    ("global_batch_size", "contradicts"), [(None, True), (8, True), (4, False)]
)
def test_a_mean_of_the_replica_s_own_batch_goes_with_averaged_gradients(
    global_batch_size, contradicts
):
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], gradients="mean")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, args=(True, global_batch_size))
    assert [w.category for w in caught] == [RuntimeWarning] * contradicts
