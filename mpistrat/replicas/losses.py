"""Scales the replicas' losses, so that the sum of their gradients is the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.context import current_mode, get_replica_context, get_strategy


def _replicas(call: str) -> int:
    if get_replica_context() is None:
        raise RuntimeError(f"{call} was called outside run; it scales one replica's loss")
    strategy = get_strategy()
    return strategy.num_replicas_in_sync * strategy.workers_combined


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """Return the sum of this replica's losses divided by the GLOBAL batch size.

    The sum of the results over the replicas is the mean over the global batch. The same holds for the gradients that
    `backward()` leaves with `gradients="sum"`. This call chooses "sum" if the program has not chosen a rule.

    Context: replica.
    Args:
        per_example_loss: array of shape [this replica's examples, ...]; an empty array gives 0.
        sample_weight: factors of the losses, of the losses' shape or of its first dimensions, such as [examples].
        global_batch_size: number of examples of all replicas. None: the size of the last step of a distributed dataset,
            if that is known and this replica's part has as many examples as the loss; otherwise this replica's examples
            times the number of replicas, as in TensorFlow.
    Returns:
        a scalar.
    Raises:
        ValueError: `per_example_loss` is a scalar, shapes do not fit, or `global_batch_size` is not positive. Also if
            it is None, and the loss is empty while the step is not known, or two loaders gave steps of different sizes
            for this loss, not all of them divisible by the number of replicas.
        TypeError: `global_batch_size` is not an integer.
        RuntimeError: in the cross-replica context, such as a `scope()` outside `run`.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> def step(per_example_loss):
        ...     return ms.compute_average_loss(per_example_loss, global_batch_size=4)
        >>> strategy.run(step, args=(torch.tensor([1.0, 3.0, 2.0, 2.0]),))
        tensor(2.)
    """
    replicas = _replicas("compute_average_loss")
    loss = arrays.as_operand(per_example_loss)
    if loss.ndim == 0:
        raise ValueError(
            "per_example_loss must have a dimension of examples, got a scalar; use reduction='none'"
        )
    if sample_weight is not None:
        weight = arrays.as_operand(sample_weight)
        shape = tuple(weight.shape)
        if shape != tuple(loss.shape[: weight.ndim]):
            raise ValueError(
                "sample_weight must have per_example_loss's shape or its first dimensions, got "
                f"{list(shape)} for losses of shape {list(loss.shape)}"
            )
        ones = (1,) * (loss.ndim - weight.ndim)
        loss = loss * weight.reshape(shape + ones)
    size = global_batch_size
    num_examples = loss.shape[0]
    if size is None:
        size = _global_batch_size(loss, replicas)
    elif isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"global_batch_size must be an integer, got {size!r:.60}")
    elif size <= 0:
        raise ValueError(f"global_batch_size must be positive, got {size}")
    if getattr(loss, "requires_grad", False):  # it is a loss to train with
        # Divided by the replica's own examples, the loss is right with gradients="mean".
        contradicts_mean = bool(replicas > 1 and global_batch_size != num_examples)
        is_guess = global_batch_size is None and not arrays.is_torch(size)
        _check_scale(num_examples, size, contradicts_mean, is_guess)
    return loss.sum() / size


def _global_batch_size(loss: Any, replicas: int) -> Any:
    """Return the number of examples of all replicas for a loss without `global_batch_size`.

    Returns: an int; while torch.compile compiles for all sizes, a tensor without dimensions.
    Raises: ValueError if the loss is empty, and the step's number of examples is not known; or if several steps may be
        meant.
    """
    num_examples = loss.shape[0]
    steps = current_mode().replicas.given_steps
    has_gradients = getattr(loss, "requires_grad", False)
    examples = steps.examples_with_gradients if has_gradients else steps.examples
    if examples is not None and replicas > 1:
        if arrays.is_torch(loss):
            import torch

            if torch.compiler.is_compiling():
                known = torch.as_tensor(examples, device="cpu")
                is_part = (known[:-1] == num_examples).any()
                return torch.where(is_part, known[-1], num_examples * replicas)
        if has_gradients:
            steps.check_sizes()
        if num_examples in examples[:-1]:
            return int(examples[-1])
    if num_examples == 0:
        raise ValueError(
            "this replica's batch is empty, and does not say how large the global batch is: pass global_batch_size"
        )
    return num_examples * replicas


def _check_scale(num_examples: int, size: int, contradicts_mean: bool, is_guess: bool) -> None:
    """Choose the sum of gradients for a loss that was divided by `size`, and warn if `size` looks wrong.

    While torch.compile compiles, `size` is not looked at, because the compiled graph serves batches of many sizes.

    Args:
        num_examples: number of examples of the loss.
        contradicts_mean: whether the loss would be wrong if gradients were averaged.
        is_guess: whether `size` assumes that all replicas have equally many examples. Used only while compiling.
    """
    import torch

    here = current_mode().replicas
    rule = here.modules.parts.rule
    is_compiling = torch.compiler.is_compiling()
    choose_sum(contradicts_mean, rule.name, is_compiling and is_guess)
    if not is_compiling and rule.chosen != "mean":
        _tell_of_size(here, num_examples, size)


def _tell_of_size(here: Any, num_examples: int, size: int) -> None:
    """Let rank 0 warn, once, if the loss was divided by `size`, the size of one replica's part, and not of the whole.

    The whole is the global batch of a loader's step, or an array that `Strategy.shard` has cut. Any other `size` is the
    program's choice: it may accumulate gradients, or scale by the step of another loader.
    """
    steps = here.given_steps
    cuts = here.sharded.cuts
    replicas = here.group.num_replicas_in_sync
    totals = {whole for part, whole, _ in cuts if part == num_examples}
    parts: list[int] = []  # of the last step
    examples = steps.examples_with_gradients
    if examples is not None:
        *parts, whole = examples.tolist()
        if num_examples in parts:
            totals.add(whole)
    if len(totals) == 1 and not steps.has_given(size):
        (total,) = totals
        if size == num_examples * replicas:
            here.sharded.tell_of_uneven(num_examples)
        elif size in (num_examples, sum(parts), total / replicas):
            steps.tell_once(
                f"compute_average_loss: global_batch_size={size} is the size of one part; the batch has {total} "
                f"examples over all {replicas} replicas. Gradients are summed over replicas, and are "
                f"{total / size:.3g} times as large as the gradients of the mean: pass global_batch_size={total}"
            )
    cuts.clear()


def choose_sum(contradicts_mean: bool, rule: str, is_guess: bool) -> None:
    """Choose the sum of gradients, if nothing is chosen, because `compute_average_loss` scales a loss.

    Args:
        contradicts_mean: whether the loss would be wrong if gradients were averaged. If so, and the mean was chosen
            already, rank 0 warns.
        rule: name of the strategy's rule, not used here. While `torch.compile` compiles, it calls this function only
            once for equal arguments, and the name makes the arguments of two strategies differ.
        is_guess: whether the loss assumes that all replicas have equally many examples. Rank 0 then warns, if a sharded
            array has parts of different sizes.
    """
    here = current_mode().replicas
    if is_guess:
        here.sharded.tell_of_uneven()
    warn = contradicts_mean and here.group.communicator.rank == 0
    here.modules.parts.rule.ask_for("sum", "compute_average_loss", warn=warn)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return a loss that every replica computes alike, divided by the number of replicas. Context: replica.

    Args:
        regularization_loss: an array or a number; the sum of its elements is scaled.
    Raises: RuntimeError in the cross-replica context, such as a `scope()` outside `run`.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> losses = strategy.run(ms.scale_regularization_loss, args=(torch.tensor(3.0),))
        >>> strategy.reduce("sum", losses, axis=None)
        tensor(3.)
    """
    replicas = _replicas("scale_regularization_loss")
    return arrays.as_operand(regularization_loss).sum() / replicas
