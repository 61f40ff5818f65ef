"""Services for long jobs: what notices that something goes wrong or that the end is near, and what goes on after."""

from mpistrat.fault_tolerance.divergence_sentinel import DivergenceSentinel
from mpistrat.fault_tolerance.elastic import Elastic, run_elastic
from mpistrat.fault_tolerance.preemption_checkpoint_handler import PreemptionCheckpointHandler
from mpistrat.fault_tolerance.preemption_watcher import PreemptionWatcher
from mpistrat.fault_tolerance.termination_config import TerminationConfig

__all__ = [
    "DivergenceSentinel",
    "Elastic",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "run_elastic",
]


def __dir__() -> list[str]:
    return __all__
