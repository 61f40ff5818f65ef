"""Draw the examples that each of four replicas gets of batches that four does not divide."""

import numpy as np
from matplotlib.figure import Figure
from style import BLUE, GREY, PURPLE, box, drawing, save

import mpistrat as ms

EXAMPLES = 22
BATCH = 10
REPLICAS = 4


def steps() -> list[list[list[int]]]:
    """For each step, for each replica, its examples."""
    strategy = ms.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
    dataset = ms.input.BatchedDataset(np.arange(EXAMPLES), batch_size=BATCH)
    return [
        [part.tolist() for part in strategy.experimental_local_results(batch)]
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]


def draw() -> Figure:
    title = f"{EXAMPLES} examples, in global batches of {BATCH}, on {REPLICAS} replicas"
    figure, axes = drawing(title, 45)
    for replica in range(REPLICAS):
        axes.text(22 + 22 * replica, 3, f"replica {replica}", ha="center")
    for number, parts in enumerate(steps()):
        top = 6 + 13 * number
        axes.text(0, top + 5.5, f"step {number + 1}", va="center", weight="bold")
        for replica, part in enumerate(parts):
            left = 12 + 22 * replica
            noun = "example" if len(part) == 1 else "examples"
            count = f"{len(part)} {noun}"
            box(axes, (left, top, 20, 11), count, GREY, filled=False, size=8)
            color = BLUE if replica % 2 else PURPLE
            for i, example in enumerate(part):
                place = (left + 1 + 6.1 * i, top + 4.8, 5.5, 5.2)
                box(axes, place, str(example), color)
    return figure


if __name__ == "__main__":
    save(draw(), __file__)
