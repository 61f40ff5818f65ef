"""Draw the loss of a job that is killed, and of the job that goes on from its checkpoint."""

from matplotlib.figure import Figure
from style import BLUE, GREEN, GREY, ORANGE, RED, figure, recorded, save


def draw() -> Figure:
    made = figure(3.6)
    axes = made.add_subplot(
        title="A job is killed, and goes on with another number of ranks",
        xlabel="training step",
        ylabel="loss of the global batch",
    )
    jobs = [job["lines"] for job in recorded("restart")]
    for lines, color, width in zip(jobs, (BLUE, ORANGE), (5, 1.8), strict=True):
        begin = lines[0]
        steps = [line for line in lines if "step" in line]
        after = f"from step {begin['begins'] + 1} on" if begin["begins"] else "from the beginning"
        numbers, losses = ([line[key] for line in steps] for key in ("step", "loss"))
        style = {"color": color, "linewidth": width, "alpha": 0.75 if color == BLUE else 1.0}
        axes.plot(numbers, losses, label=f"{begin['ranks']} ranks, {after}", **style)
    first = [line for line in jobs[0] if "step" in line][-1]
    axes.plot(first["step"], first["loss"], "X", color=RED, markersize=10)
    axes.annotate(
        f"rank 1 is killed\nafter step {first['step']}",
        (first["step"], first["loss"]),
        (first["step"] + 4, first["loss"] + 0.06),
        arrowprops={"arrowstyle": "-", "color": RED},
        color=RED,
    )
    saved = [line["saved"] for lines in jobs for line in lines if "saved" in line]
    low = axes.get_ylim()[0]
    axes.plot(saved, [low] * len(saved), "^", color=GREEN, label="checkpoint", clip_on=False)
    axes.set_ylim(low)
    axes.grid(alpha=0.25, color=GREY)
    axes.legend()
    return made


if __name__ == "__main__":
    save(draw(), __file__)
