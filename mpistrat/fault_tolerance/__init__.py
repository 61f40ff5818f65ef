"""Services for long jobs: what notices that something goes wrong or that the end is near, and what goes on after."""

from mpistrat.fault_tolerance.divergence_sentinel import DivergenceSentinel as DivergenceSentinel
from mpistrat.fault_tolerance.elastic import Elastic as Elastic
from mpistrat.fault_tolerance.elastic import run_elastic as run_elastic
from mpistrat.fault_tolerance.preemption_checkpoint_handler import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mpistrat.fault_tolerance.preemption_watcher import PreemptionWatcher as PreemptionWatcher
from mpistrat.fault_tolerance.termination_config import TerminationConfig as TerminationConfig
