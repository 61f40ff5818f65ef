"""Draw the values of one step on two ranks: batch, parts, gradients, sum, weights."""

from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, ORANGE, PURPLE, arrow, box, drawing, recorded, save

CENTERS = (27, 73)  # of the columns of rank 0 and rank 1


def numbers(values: list[float]) -> str:
    texts = [f"{value:.4f}".replace("-", "−") for value in values]
    return f"[{', '.join(texts)}]"


def draw() -> Figure:
    (job,) = recorded("values_of_a_step")
    ranks = job["lines"]
    parameters = ranks[0]["parameters"]
    weight = tuple(parameters["weight"])
    bias = tuple(parameters["bias"])
    calls = []
    for event in job["trace"]:
        if event["pid"] == 0 and event["name"] == "all_reduce":
            call = event["args"]["call"].split(", gradients")[0]
            calls.append(f"{call}): {event['args']['bytes']} bytes")
    agreement, total = calls
    examples = sum(rank["examples"][0] for rank in ranks)
    width = ranks[0]["examples"][1]

    title = f"One step of 2 ranks: weights of shape {weight}, bias of shape {bias}"
    figure, axes = drawing(title, 74)
    box(axes, (4, 1, 92, 7), f"global batch: {examples} examples of {width} numbers", PURPLE)
    box(axes, (4, 36, 92, 5), f"the ranks agree on the step: {agreement}", GREY, size=8)
    box(axes, (4, 45, 92, 7), f"gradients of both parameters: {total}", ORANGE)
    for center, rank in zip(CENTERS, ranks, strict=True):
        name = f"rank {rank['rank']}"
        left = center - 22.3
        rows = rank["examples"][0]
        box(axes, (left, 12, 44.6, 7), f"{name}: {rows} examples", PURPLE)
        own = f"{name}: gradient of the bias by its examples\n{numbers(rank['gradient'])}"
        box(axes, (left, 23, 44.6, 9), own, BLUE)
        gradient = f"{name}: bias.grad = {numbers(rank['sum'])}"
        box(axes, (left, 56, 44.6, 7), gradient, ORANGE)
        after = f"{name}: bias = {numbers(rank['bias'])}"
        box(axes, (left, 67, 44.6, 7), after, GREEN)
        for begin in (8, 19, 32, 41, 52, 63):
            arrow(axes, (center, begin), (center, begin + 4))
    steps = {10: "shared out", 21: "backward()", 65: "optimizer.step()"}
    for place, text in steps.items():
        axes.text(50, place, text, ha="center", va="center", family="monospace", size=8)
    return figure


if __name__ == "__main__":
    save(draw(), __file__)
