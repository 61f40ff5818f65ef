"""Communicators: they move bytes between the ranks of one group."""

from mpistrat.communicators.communicator import Communicator as Communicator
from mpistrat.communicators.communicator import RaisingOnAll as RaisingOnAll
from mpistrat.communicators.reduction import SUM as SUM
from mpistrat.communicators.reduction import Reduction as Reduction
from mpistrat.communicators.reduction import reducing as reducing
