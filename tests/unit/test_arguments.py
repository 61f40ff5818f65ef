"""Every argument of a public function is used, or says that it does nothing here.

tests/launch/test_no_effect.py hears what they say.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpistrat as ms

PACKAGE = Path(ms.__file__).parent
DOORS = (
    *(ms, ms.checkpoint, ms.cluster_resolver, ms.coordinator, ms.errors, ms.experimental),
    *(ms.experimental.partitioners, ms.fault_tolerance, ms.input, ms.tpu, ms.wire_formats),
    *(ms.compat.contrib, ms.compat.v1, ms.compat.v1.experimental),
)
# By argument, or function, that is not used: why.
NOT_USED = {
    "CrossDeviceOps.gather_implementation: options": "it joins components of one rank, and sends nothing",
    "ReductionToOneDevice.reduce_implementation: options": "it adds up components of one rank",
    "FixedShardsPartitioner.__call__: dtype": "what every partitioner is given",
    "PerWorker.resource: table": "the parts are made already; PerWorkerValues has them made",
    "StrategyExtended.state_schema: state": "what every schema is given; this one is always the same",
    "StrategyV1.group: value": "what has been returned is computed",
    "TPUClusterResolver.master: rpc_layer": "the layer of a TPU is grpc, in TensorFlow, too",
    "get_strategy()": "the default strategy returns the dataset as it is",
    **{
        f"{resolver}.num_accelerators: {argument}": "every task has as many as this one"
        for resolver in (
            *("ClusterResolver", "SimpleClusterResolver", "SlurmClusterResolver"),
            "TPUClusterResolver",
        )
        for argument in ("task_type", "task_id")
    },
}
# By field of a public dataclass that nothing reads: why.
NOT_READ = {
    "RunOptions.experimental_bucketizing_dynamic_shape": "`run` says that RunOptions do nothing",
    "RunOptions.experimental_enable_dynamic_batch_size": "as above",
    "RunOptions.experimental_xla_options": "as above",
}


def public_things() -> set[Any]:
    """The classes and functions of the doors, and the classes of the default strategies."""
    things = {getattr(door, name) for door in DOORS for name in dir(door)}
    things |= {type(ms.get_strategy()), type(ms.compat.v1.get_strategy())}
    return {thing for thing in things if getattr(thing, "__module__", "").startswith("mpistrat")}


def functions_of(thing: Any) -> Iterator[Callable[..., Any]]:
    """A function, or the public methods of a class, inherited ones too."""
    if inspect.isfunction(thing):
        yield thing
    owners = thing.__mro__ if inspect.isclass(thing) and not is_protocol(thing) else ()
    for owner in owners:
        for name, member in vars(owner).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            is_public = not name.startswith("_") or name in ("__call__", "__init__", "__new__")
            if is_public and inspect.isfunction(function):
                yield function


def is_protocol(thing: Any) -> bool:
    return getattr(thing, "_is_protocol", False)


def unused_arguments(function: Callable[..., Any]) -> Iterator[str]:
    """The arguments that the body does not name; none where classes that are derived do the work."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    only_raises = statements and all(isinstance(part, ast.Raise) for part in statements)
    if only_raises or getattr(function, "__isabstractmethod__", False):
        return
    used = {node.id for part in statements for node in ast.walk(part) if isinstance(node, ast.Name)}
    arguments = tree.args
    for argument in (
        *(*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs),
        *filter(None, (arguments.vararg, arguments.kwarg)),
    ):
        if argument.arg not in used | {"self", "cls"} and not argument.arg.startswith("_"):
            yield argument.arg


def is_written_here(function: Callable[..., Any]) -> bool:
    """Not generated, as the constructors of dataclasses are, and not Python's."""
    return Path(function.__code__.co_filename).is_relative_to(PACKAGE)


def names_of_unused() -> Iterator[str]:
    defaults = {type(ms.get_strategy()).__name__, type(ms.compat.v1.get_strategy()).__name__}
    for function in {function for thing in public_things() for function in functions_of(thing)}:
        if is_written_here(function):
            owner = function.__qualname__.partition(".")[0]
            for argument in unused_arguments(function):
                whole = "get_strategy()" if owner in defaults else function.__qualname__
                yield whole if whole in NOT_USED else f"{whole}: {argument}"


def test_every_argument_is_used() -> None:
    assert set(names_of_unused()) == set(NOT_USED)


def test_an_argument_that_is_not_used_is_found() -> None:
    def unused(first: int, *others: int, last: int = 0, **named: int) -> int:
        """first, others"""
        return last

    assert [*unused_arguments(unused)] == ["first", "others", "named"]
    assert not [*unused_arguments(ms.CrossDeviceOps.reduce_implementation)]


def attributes_read(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_field_of_options_is_read() -> None:
    """By others than the class that has it, which checks it."""
    options = {thing.__name__: thing for thing in public_things() if is_options(thing)}
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")]
    parts = [part for tree in trees for part in tree.body]
    others = [part for part in parts if getattr(part, "name", "") not in options]
    read = set().union(*map(attributes_read, others))
    fields = {(name, field.name) for name in options for field in dataclasses.fields(options[name])}
    assert len(options) == 3
    assert {f"{name}.{field}" for name, field in fields if field not in read} == set(NOT_READ)


def is_options(thing: Any) -> bool:
    return inspect.isclass(thing) and thing.__name__.endswith("Options")
