"""Calls in words."""

import pytest

from mpistrat.communicators.contract.call_signature import signature_of


@pytest.mark.parametrize(
    ("label", "op"),
    [
        ("MEAN", "mean"),
        ("MEAN of {'a': *}", "mean"),
        ("SUM of mean * along axis 0", "mean"),
        ("SUM", "sum"),
        ("", "sum"),
    ],
)
def test_the_operation_is_the_program_s(label: str, op: str) -> None:
    text = str(signature_of(("all_reduce", "sum", "float64", (3,), label)))
    assert text == f"all_reduce({op}, float64, (3,){', ' * bool(label)}{label})"
