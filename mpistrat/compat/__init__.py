"""Names of earlier versions of tf.distribute: `v1` and `contrib`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.compat import contrib, v1
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = ["contrib", "v1"]
