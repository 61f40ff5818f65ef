"""Services for long jobs: preemption, time limits, ranks that are lost, and replicas that drift apart."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.fault_tolerance.divergence_sentinel import DivergenceSentinel
    from mpistrat.fault_tolerance.elastic import Elastic, run_elastic
    from mpistrat.fault_tolerance.preemption_checkpoint_handler import PreemptionCheckpointHandler
    from mpistrat.fault_tolerance.preemption_watcher import PreemptionWatcher
    from mpistrat.fault_tolerance.termination_config import TerminationConfig
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = [
    "DivergenceSentinel",
    "Elastic",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "run_elastic",
]
