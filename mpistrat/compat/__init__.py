"""Names of earlier versions of tf.distribute."""

from mpistrat.compat import contrib, v1

__all__ = ["contrib", "v1"]


def __dir__() -> list[str]:
    return __all__
