"""tf.distribute.MultiWorkerMirroredStrategy. Its CPU collectives are TensorFlow's own ring over gRPC."""

from __future__ import annotations

import functools
import json
import os
import socket
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from mpistrat.tools.bench.rounds import CannotTakePart, Contestants, all_ranks, check_on_host
from mpistrat.tools.bench.work import Work


@functools.cache
def _start() -> Any:
    """Return the process's one strategy of TensorFlow's. The first call makes it, and starts this worker's server.

    Called by: every rank.
    """
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    with socket.socket() as probe:
        probe.bind(("", 0))
        host = socket.gethostname()
        if len(set(all_ranks().all_gather_object(host))) == 1:
            host = "127.0.0.1"
        address = f"{host}:{probe.getsockname()[1]}"
        workers = all_ranks().all_gather_object(address)
    task = {"type": "worker", "index": all_ranks().rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    ring = tf.distribute.experimental.CollectiveCommunication.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def training_steps(work: Work) -> Contestants:
    """Return a step of the work's perceptron in TensorFlow, with the same weights and batch. Called by: every rank.

    Returns: a dict with one entry, from the contestant's name to the step.
    Raises: CannotTakePart for a model that is no perceptron, or on a device.
    """
    check_on_host(work.device)
    layers = _perceptron(work)
    strategy = _start()
    inputs, targets = (tf.constant(tensor.numpy()) for tensor in work.batch)
    inputs = tf.reshape(inputs, [len(inputs), -1])
    with strategy.scope():
        weights = [tf.Variable(layer.weight.detach().numpy().T) for layer in layers]
        biases = [tf.Variable(layer.bias.detach().numpy()) for layer in layers]
    variables = weights + biases

    def descend(variable: Any, gradient: Any) -> Any:
        return variable.assign_sub(0.01 * gradient)

    def update(strategy: Any, gradients: Any) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, descend, (gradient,))

    def replica_step() -> Any:
        with tf.GradientTape() as tape:
            hidden = inputs
            for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
                hidden = tf.nn.relu(tf.matmul(hidden, weight) + bias)
            logits = tf.matmul(hidden, weights[-1]) + biases[-1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_mean(losses)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce("MEAN", tape.gradient(loss, variables))
        context.merge_call(update, (gradients,))
        return loss

    def step() -> Any:
        return strategy.run(replica_step)

    compiled = tf.function(step)
    return {"TensorFlow, ring": lambda: torch.from_numpy(np.array(compiled()))}


def _perceptron(work: Work) -> list[torch.nn.Linear]:
    """Return the linear layers of the work's model, in order. Raises: CannotTakePart if the model is no perceptron."""
    module, _ = work.build()
    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    if not isinstance(module, torch.nn.Sequential) or len(layers) * 2 != len(module):
        raise CannotTakePart("this model is not written in TensorFlow here; the MLPs are")
    return layers


def all_reduces(values: np.ndarray) -> Contestants:
    check_on_host(getattr(values, "device", "cpu"))
    strategy = _start()
    tensor = tf.constant(values)

    def sum_over_replicas() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tensor)

    def all_reduce() -> Any:
        return strategy.run(sum_over_replicas)

    compiled = tf.function(all_reduce)
    return {"TensorFlow, ring": lambda: compiled().numpy()}
