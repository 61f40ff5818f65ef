"""Records the files of this folder: `MPISTRAT_TRACE=trace mpiexec -n 2 python record.py`, with tests on PYTHONPATH."""

import json

from mpistrat.trace import merging
from support.recorded_training import FOLDER, RecordedTraining

merging.remove_parts = lambda folder: None  # the test merges them again
training = RecordedTraining(seed=1)
training.train()
path = training.manager.save(int(training.steps.numpy()))
restored = RecordedTraining(seed=2)
restored.manager.restore(path)
results = restored.results()
if training.strategy.extended.communicator.rank == 0:
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
