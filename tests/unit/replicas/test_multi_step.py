import numpy as np
import pytest

import mpistrat as ms


def test_steps_on_an_iterator():
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = []

    def step(context, batch):
        assert ms.in_cross_replica_context()
        seen.append(batch)
        doubled = strategy.run(lambda x: np.asarray(2.0 * x), (batch,))
        context.set_last_step_output("sum", doubled, "sum")
        context.set_last_step_output("raw", batch)
        context.set_non_tensor_output("name", "last")

    batches = iter([1.0, 2.0, 3.0])
    context = strategy.extended.experimental_run_steps_on_iterator(step, batches, 2, {"other": 7})
    assert seen == [1.0, 2.0]
    assert next(batches) == 3.0
    assert context.last_step_outputs == {"sum": 8.0, "raw": 2.0, "other": 7}
    assert context.non_tensor_outputs == {"name": "last"}


def test_outputs_inside_run_are_reduced():
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(context, batch):
        def replica():
            value = np.asarray(1.0 + ms.get_replica_context().replica_id_in_sync_group)
            context.set_last_step_output("mean", value, "mean")
            with pytest.raises(AssertionError, match="reduce_op"):
                context.set_last_step_output("x", value)

        strategy.run(replica)

    context = strategy.extended.experimental_run_steps_on_iterator(step, iter([0]))
    assert context.last_step_outputs == {"mean": 1.5}
