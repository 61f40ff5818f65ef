"""Names of earlier versions of tf.distribute."""

from mpistrat.compat import moved_modules, v1

moved_modules.install()

__all__ = ["v1"]


def __dir__() -> list[str]:
    return __all__
