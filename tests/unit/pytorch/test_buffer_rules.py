"""`reduce_buffers` checks its arguments."""

import pytest

torch = pytest.importorskip("torch")

import mpistrat as ms  # noqa: E402


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"seen": "median"}, "seen='median', and 1 modules in Sequential have"),
        ({"sen": "sum"}, "sen='sum', and 0 modules in Sequential have a buffer 'sen'"),
        ({"seen": "mean"}, "a mean is for floats only"),
        ({"empty": "sum"}, "and 0 modules"),
    ],
)
def test_rules_that_fit_no_buffer(rules: dict[str, str], message: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model[0].register_buffer("seen", torch.tensor(0))
    model[0].register_buffer("empty", None)
    with pytest.raises(ValueError, match="reduce_buffers got ") as raised:
        ms.reduce_buffers(model, **rules)  # type: ignore[arg-type]
    assert message in str(raised.value)
