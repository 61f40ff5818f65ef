"""A state of one class of optimizers or schedulers, and an object of another class."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mpistrat.pytorch.other_classes import classes_of, fits

KINDS: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")},
    **{name: getattr(torch.optim, name) for name in ("Adagrad", "RMSprop", "Rprop", "LBFGS")},
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Lion(torch.optim.Adam):
    """A class of the program that has an entry more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = self.state[parameter].get("slow", 0) + 1
        return super().step(closure)


class Outer(torch.optim.Optimizer):
    """It contains an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def optimizer_of(kind: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))])


def stepped(kind: Any) -> torch.optim.Optimizer:
    optimizer = optimizer_of(kind)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: torch.tensor(2.0))
    return optimizer


def goes_on(optimizer: torch.optim.Optimizer, state: Any) -> bool:
    try:
        optimizer.load_state_dict(state)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(lambda: torch.tensor(2.0))
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("before", KINDS)
def test_each_optimizer_after_each_other(before: str) -> None:
    """The judgement is as the program would find out at its first step. It changes nothing."""
    state = stepped(KINDS[before]).state_dict()
    whole = copy.deepcopy(state)
    for after in KINDS.values():
        optimizer = optimizer_of(after)
        kept = copy.deepcopy(optimizer.state_dict())
        judged = fits(optimizer, before, state)
        assert str(state) == str(whole)
        assert str(optimizer.state_dict()) == str(kept)
        assert judged == goes_on(optimizer, copy.deepcopy(state)), after


def test_optimizers_of_the_program() -> None:
    state = stepped(torch.optim.Adam).state_dict()
    assert fits(optimizer_of(Lion), "Adam", state)
    assert not fits(optimizer_of(Lion), "SGD", stepped(KINDS["SGD"]).state_dict())
    inner = stepped(KINDS["SGD"])
    before = copy.deepcopy(inner.state_dict())
    outer = Outer(inner)
    assert fits(outer, "Adam", state)  # nobody knows
    assert str(inner.state_dict()) == str(before)
    with_rate = optimizer_of(torch.optim.AdamW)
    lr_scheduler.StepLR(with_rate, 3)  # it replaces `step` of this optimizer
    parameters = copy.deepcopy(with_rate.param_groups[0]["params"])
    assert fits(with_rate, "Adam", state)
    assert all(map(torch.equal, parameters, with_rate.param_groups[0]["params"]))


class Warm(lr_scheduler.CosineAnnealingLR):
    def __init__(self, *args: Any) -> None:
        self.warm = 3
        super().__init__(*args)


class Renamed(lr_scheduler.CosineAnnealingLR):
    pass


def test_schedules() -> None:
    optimizer = optimizer_of(torch.optim.Adam)
    steps = lr_scheduler.StepLR(optimizer, 3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    assert not fits(cosine, "StepLR", steps.state_dict())
    assert not fits(steps, "CosineAnnealingLR", cosine.state_dict())
    assert fits(lr_scheduler.ExponentialLR(optimizer, 0.5), "StepLR", steps.state_dict())
    assert fits(Warm(optimizer, 9), "CosineAnnealingLR", cosine.state_dict())
    assert fits(Renamed(optimizer, 9), "Old", cosine.state_dict())
    assert not fits(Warm(optimizer, 9), "Old", cosine.state_dict())


class Progress:
    step = 3  # no method: this is no optimizer


def test_names_of_classes() -> None:
    optimizer = optimizer_of(torch.optim.Adam)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 3)]
    objects = {
        "model": torch.nn.LSTMCell(1, 1),
        "optimizer": optimizer,
        "schedule": lr_scheduler.SequentialLR(optimizer, parts, [2]),
        "scaler": torch.amp.GradScaler("cpu"),
        "progress": Progress(),
    }
    assert classes_of(objects) == {
        "optimizer": "Adam",
        "schedule": "SequentialLR/LinearLR/StepLR",
        "scaler": "GradScaler",
    }
