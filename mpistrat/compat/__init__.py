"""Names of earlier versions of tf.distribute."""

from mpistrat.compat import v1 as v1
