"""Which backends a program may name, and is given ours."""

import pytest

from mpistrat.torch_distributed.default_backend import is_replaced


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        *((None, True), ("gloo", True), ("NCCL", True), ("mpi", True), ("mpistrat", True)),
        *(("cpu:gloo,cuda:nccl", True), ("cpu:gloo, cuda:ucc", False)),
        *(("fake", False), ("ucc", False), ("xla", False)),
    ],
)
def test_backends_that_are_replaced(backend: str | None, expected: bool) -> None:
    assert is_replaced(backend) is expected
