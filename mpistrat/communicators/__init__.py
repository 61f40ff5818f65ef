"""How bytes move inside one group of ranks."""

from mpistrat.communicators.checked import CheckedCommunicator as CheckedCommunicator
from mpistrat.communicators.communicator import Communicator as Communicator
from mpistrat.communicators.local import LocalCommunicator as LocalCommunicator
