"""The rule of each buffer: how the replicas' copies of a buffer that a forward has written become one.

The program declares rules by `mpistrat.reduce_buffers`. The names of buffers tell others.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.pytorch.modules.registry import all_registries, is_inexact

RULES = ("min", "max", "sum", "mean", "first", "local")
# Words in the names of running means and of the counts of their updates: "running_var", "embed_avg", "ema_loss".
_OF_MEANS = {"mean", "var", "std", "avg", "average", "ema", "center", "tracked"}
_EXTREMES = {"min_val": "min", "max_val": "max"}  # in observers of torch.ao and torchao
_declared: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the declared rules, by module and name


def declare(root: Module, rules: Mapping[str, str]) -> None:
    """Do the work of `mpistrat.reduce_buffers`, for `root` and its submodules.

    Raises: ValueError if a rule is unknown, if no module has a buffer of a name, or for a mean of integers.
    """
    for key, rule in rules.items():
        owners = [module for module in root.modules() if module._buffers.get(key) is not None]
        has_mean = all(is_inexact(getattr(owner, key)) for owner in owners)
        if rule not in RULES or not owners or (rule == "mean" and not has_mean):
            raise ValueError(
                f"reduce_buffers got {key}={rule!r:.40}, and {len(owners)} modules in {type(root).__name__} have a "
                f"buffer {key!r}. Give the name of a buffer and one of {', '.join(RULES)}; a mean is for floats only"
            )
        for owner in owners:
            _declared.setdefault(owner, {})[key] = rule
            for registry in all_registries:
                slot = registry.buffer(owner, key)
                if slot is not None:
                    slot.declare(rule)


def rule_of(module: Module, key: str) -> str:
    """Return the rule of the buffer `key` of `module`, one of `RULES`; "" if nothing tells it.

    "mean" stands for the usual rule: the mean, or for integers the first replica's value.
    """
    declared: str = _declared.get(module, {}).get(key, "")
    if declared:
        return declared
    if "zero_point" in module._buffers:  # made with `scale` from an observer's values
        return "first"
    averages = any("MovingAverage" in kind.__name__ for kind in type(module).__mro__)
    if key in _EXTREMES and not averages:
        return _EXTREMES[key]
    is_mean = averages or not _OF_MEANS.isdisjoint(key.lower().split("_"))
    if is_mean or key in module._non_persistent_buffers_set:
        return "mean"
    return ""
