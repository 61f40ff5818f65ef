"""What a strategy is made of: an interface, its siblings, and parts that wiring alone puts together."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpistrat as ms
from mpistrat.parameter_server.strategies.server_strategy_parts import ServersExtended
from mpistrat.parameter_server.strategies.v1_strategy import BetweenGraphStrategy
from mpistrat.strategies.replicated import ReplicatedExtended
from mpistrat.xla.tpu_strategy_parts import XlaExtended

PACKAGE = Path(__file__).parents[2] / "mpistrat"

STRATEGIES = (
    *(ms.OneDeviceStrategy, ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy),
    *(ms.CentralStorageStrategy, ms.ParameterServerStrategy, BetweenGraphStrategy, ms.TPUStrategy),
)

# Private attributes that are set from outside: in the class's own file, or of torch's objects, which have no other way.
SET_FROM_OUTSIDE = {
    "checkpoint/state_tree.py: _metadata of mapping",
    "communicators/contract/contract.py: _is_closed of contract",
    "communicators/contract/contract.py: _is_forked of contract",
    "communicators/contract/joint_errors.py: _mpistrat_raised_by_all of error",
    "input/torch_loader.py: _iterator of made",
    "parameter_server/modules/scheduled_modules.py: _opt_called of value",
    "pytorch/hooks.py: _compiled_call_impl of module",
    "pytorch/modules/placing.py: _flat_weight_refs of child",
    "communicators/transports/accelerator/torch_groups.py: _timeout of options",
    "tools/verify/variable_rounds.py: _update of MirroredVariable",
    "variables/variable.py: _container of component",
    "xla/runtime.py: _WORLD_SIZE of self._runtime",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def test_the_interface_of_strategies_is_small() -> None:
    assert 1 <= len(ms.StrategyExtended.__abstractmethods__) <= 12


@pytest.mark.parametrize("sibling", [ReplicatedExtended, ServersExtended, XlaExtended])
def test_siblings_implement_and_do_not_overwrite(sibling: type[ms.StrategyExtended]) -> None:
    """What they define themselves is abstract in the interface; none inherits from another."""
    defined = {
        name
        for name, value in vars(sibling).items()
        if inspect.isfunction(value) or isinstance(value, property)
    }
    assert sibling.__bases__ == (ms.StrategyExtended,)
    assert defined - {"__init__"} == ms.StrategyExtended.__abstractmethods__


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_calls_the_constructor_of_strategy(strategy: type[ms.Strategy]) -> None:
    """Or leaves it to a method of its own that does."""
    text = inspect.getsource(strategy)
    assert "super().__init__(" in text
    assert "_extended =" not in text


def test_wiring_alone_puts_parts_together() -> None:
    callers = {
        file
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Parts"
    }
    assert callers == {
        "strategies/strategy_parts.py",
        "parameter_server/strategies/server_strategy_parts.py",
        "xla/tpu_strategy_parts.py",
    }


def test_private_attributes_are_set_by_their_owners() -> None:
    found = {
        f"{file}: {node.attr} of {ast.unparse(node.value)}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
    }
    assert found == SET_FROM_OUTSIDE
