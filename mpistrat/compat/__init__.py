"""Names of earlier versions of tf.distribute: `v1` and `contrib`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.compat import contrib as contrib
    from mpistrat.compat import v1 as v1
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
