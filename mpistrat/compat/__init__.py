"""Names of earlier versions of tf.distribute."""

from mpistrat.compat import contrib, moved_modules, v1

moved_modules.install()

__all__ = ["contrib", "v1"]


def __dir__() -> list[str]:
    return __all__
