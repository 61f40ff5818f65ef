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
    wide = {"color": BLUE, "linewidth": 5, "alpha": 0.75}
    narrow = {"color": ORANGE, "linewidth": 1.8, "alpha": 1.0}
    for lines, style in zip(jobs, (wide, narrow), strict=True):
        begin = lines[0]
        after = "from the beginning"
        if begin["begins"]:
            after = f"from step {begin['begins'] + 1} on"
        steps = [line for line in lines if "step" in line]
        numbers = [line["step"] for line in steps]
        losses = [line["loss"] for line in steps]
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
    lows = [low] * len(saved)
    axes.plot(saved, lows, "^", color=GREEN, label="checkpoint", clip_on=False)
    axes.set_ylim(low)
    axes.grid(alpha=0.25, color=GREY)
    axes.legend()
    return made


if __name__ == "__main__":
    save(draw(), __file__)
