"""The recorded cases of what TPUStrategy.run takes: here it compiles by itself, so a plain function is no error."""

from __future__ import annotations

import torch

import mpistrat as ms
from conformance import cases


def _recorded() -> dict[str, object]:
    return {
        case["program"]["fn"]: case["expect"]
        for case in cases.read(cases.RECORDED)
        if case["program"]["op"] == "tpu_run_validation"
    }


def test_the_kinds_of_functions_are_those_that_are_tried_here() -> None:
    assert set(_recorded()) == {"plain python, eager", "compiled function"}


def test_a_plain_function_is_compiled() -> None:
    """TensorFlow raises NotImplementedError, and asks for a tf.function."""
    strategy = ms.TPUStrategy()

    def plain(value: torch.Tensor) -> torch.Tensor:
        return value * 3 + 1

    operand = torch.arange(7.0, device=strategy.extended.worker_devices[0])
    assert strategy.run(plain, args=(operand,)).tolist() == [3.0 * i + 1 for i in range(7)]
    (compiled,) = strategy.extended.compilations.all
    assert (compiled.shapes, compiled.graphs) == (("float32[7]",), 1)


def test_a_function_without_arrays_runs() -> None:
    assert _recorded()["compiled function"] == {"value": "ok"}
    assert ms.TPUStrategy().run(lambda: "ok") == "ok"
