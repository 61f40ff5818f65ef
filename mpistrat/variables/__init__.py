"""Variables: how their copies are kept, and how a strategy makes and changes them."""

from mpistrat.variables.variable import Variable as Variable
