"""Services for long jobs: preemption, time limits, ranks that are lost, and replicas that drift apart."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.fault_tolerance.divergence_sentinel import (
        DivergenceSentinel as DivergenceSentinel,
    )
    from mpistrat.fault_tolerance.elastic import Elastic as Elastic
    from mpistrat.fault_tolerance.elastic import run_elastic as run_elastic
    from mpistrat.fault_tolerance.preemption_checkpoint_handler import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    )
    from mpistrat.fault_tolerance.preemption_watcher import PreemptionWatcher as PreemptionWatcher
    from mpistrat.fault_tolerance.termination_config import TerminationConfig as TerminationConfig
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
