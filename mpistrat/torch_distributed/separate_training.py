"""A notice for programs under `mpistrat run` that train on each rank by itself: they have no process group."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpistrat.machine.notices import tell
from mpistrat.torch_distributed.compilation import not_compiled
from mpistrat.torch_distributed.default_group import is_wanted


def look_for_separate_training(ranks: int) -> None:
    """Print the notice once, when an optimizer steps on one of several ranks while torch has no default group.

    Every strategy has a default group here, unless the job was started with `--keep-backend`: then there is no notice.

    Called by: rank 0.   Args: ranks: the number of ranks of the job.
    """
    tell_once = functools.cache(tell)

    def before_step(*_: Any) -> None:
        if ranks > 1 and is_wanted():
            tell_once(
                "an optimizer steps, and the program has neither called init_process_group nor made a strategy. If it "
                f"does not add up gradients in its own way, each of the {ranks} ranks trains a model by itself, on "
                "all of the data. Use DistributedDataParallel, or make a strategy: docs/existing_programs.md has diffs"
            )

    # It stays registered: torch goes through its hooks meanwhile, so none may be removed.
    register_optimizer_step_pre_hook(not_compiled(before_step))
