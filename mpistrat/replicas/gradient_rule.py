"""Decides whether `backward()` leaves the sum or the mean of the replicas' gradients, and remembers the reason."""

from __future__ import annotations

import itertools
import sys
import warnings

from mpistrat.liveness.call_site import call_site

_numbers = itertools.count()


class GradientRule:
    """One strategy's rule: `backward()` leaves the "sum" or the "mean" of the replicas' gradients, or it is undecided.

    The program decides by the strategy's argument `gradients`. Without it, the first loss that is scaled for one of the
    rules decides.

    Args:
        gradients: the strategy's argument: "sum", "mean" or None.

    Attributes:
        chosen: "sum", "mean", or None while the rule is undecided.
        name: a name that no other rule in this process has.
        is_of_loss: whether a loss has decided the rule, and not the program's argument.
    """

    def __init__(self, gradients: str | None = None) -> None:
        self.name = f"rule {next(_numbers)}"
        self.chosen = gradients
        self._decided_by = f"the strategy's argument gradients={gradients!r}"
        self._has_warned = self.is_of_loss = False

    def ask_for(self, rule: str, call: str, *, warn: bool) -> None:
        """Choose `rule` if nothing is chosen. A rule that is chosen already stays.

        Args:
            rule: "sum" or "mean".
            call: name of the function that has scaled a loss for `rule`, for messages.
            warn: whether to warn, once, if the other rule is chosen already.
        """
        if self.chosen is None:
            self.chosen = rule
            site = call_site(sys._getframe())
            self._decided_by = f"{call}, called at {site}"
            self.is_of_loss = True
        elif self.chosen != rule and warn and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{call} scales the loss for the {rule} of gradients, but {self}: gradients are divided by the number "
                f"of replicas twice. Leave {call} out, or give the strategy gradients={rule!r}",
                RuntimeWarning,
                stacklevel=4,
            )

    def default_to_mean(self, call: str) -> None:
        """Choose the mean, like DistributedDataParallel, if nothing is chosen.

        Called by: each `backward()` inside `replica()`. Args: call: words for it, for messages.
        """
        if self.chosen is None:
            self.chosen = "mean"
            site = call_site(sys._getframe())
            self._decided_by = (
                f"{call} inside strategy.replica(), where it is the default, at {site}"
            )

    def decided(self, call: str) -> str:
        """Return the rule, "sum" or "mean". Raises: RuntimeError that begins with `call`, while it is undecided."""
        if self.chosen is None:
            raise RuntimeError(
                f"{call}: are gradients to be summed or averaged? Scale the loss with "
                "mpistrat.compute_average_loss(per_example_loss, global_batch_size=...), so that they are summed, "
                'or make the strategy with gradients="sum" or gradients="mean" (DistributedDataParallel\'s rule)'
            )
        return self.chosen

    def __str__(self) -> str:
        if self.chosen is None:
            return "whether backward() leaves the sum or the mean of gradients is undecided"
        return f"backward() leaves the {self.chosen} of gradients, decided by {self._decided_by}"
