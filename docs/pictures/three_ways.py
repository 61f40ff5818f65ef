"""Draw the three ways by which a program comes to mpistrat.

The drawing has much text in two fonts, so it is written as SVG and not by `style.py`.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
# For each way: what the program is today, what changes, the lines, and the command.
WAYS = (
    (
        "It uses torch.distributed",
        "DDP, FSDP2, accelerate, Trainer, …",
        "Change nothing",
        ("# Lightning: its devices and", "# num_nodes must match the ranks"),
        "mpistrat run train.py",
    ),
    (
        "It trains on one device",
        "a loop over batches",
        "Change a few lines",
        (
            "strategy = (",
            "    ms.MultiWorkerMirroredStrategy()",
            "    .enter_replica())",
            "model, optimizer, loader = (",
            "    strategy.prepare(…))",
        ),
        "python train.py",
    ),
    (
        "It is new",
        "you write the step of one copy",
        "Use scope and run",
        (
            "with strategy.scope():",
            "    model = Net()",
            "",
            "for batch in distributed:",
            "    strategy.run(step, (batch,))",
        ),
        "python train.py",
    ),
)
WIDTH = 900
HEIGHT = 330
CARD = 284
GAP = 12
TOP = 74
COLORS = ("#0369a1", "#b45309", "#15803d")
# Its own light ground: readable on light pages and on dark ones.
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1e293b; }
.question { font-size: 18px; font-weight: 600; text-anchor: middle; }
.today { font-size: 16px; font-weight: 600; }
.small { font-size: 12.5px; fill: #475569; }
.change { font-size: 15px; font-weight: 600; }
.code { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
"""


def text(x: float, y: float, kind: str, words: str, **attributes: str) -> str:
    begin = f'<text x="{x}" y="{y}" class="{kind}" xml:space="preserve"'
    for name, value in attributes.items():
        begin += f' {name}="{value}"'
    return f"{begin}>{escape(words)}</text>"


def card(left: float, color: str, way: tuple) -> list[str]:
    today, example, change, lines, command = way
    middle = left + CARD / 2
    x = left + 16
    code = [text(x, TOP + 106 + 18 * row, "code", line) for row, line in enumerate(lines)]
    return [
        f'<path d="M{WIDTH / 2} 44 L{middle} {TOP}" stroke="#94a3b8" stroke-width="1.5"/>',
        f'<rect x="{left}" y="{TOP}" width="{CARD}" height="{HEIGHT - TOP - 12}" rx="8" '
        f'fill="#fff" stroke="{color}" stroke-width="1.5"/>',
        text(x, TOP + 28, "today", today),
        text(x, TOP + 48, "small", example),
        text(x, TOP + 82, "change", change, style=f"fill: {color}"),
        *code,
        text(x, TOP + 208, "small", "start it by"),
        text(x, TOP + 227, "code", f"mpirun -n 4 {command}", style="font-weight: 600"),
    ]


def main() -> None:
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>Three ways to mpistrat: change nothing, a few lines, or scope and run</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#f8fafc"/>',
        text(WIDTH / 2, 32, "question", "What is your program today?"),
    ]
    for place, (color, way) in enumerate(zip(COLORS, WAYS, strict=True)):
        drawn += card(GAP + place * (CARD + GAP), color, way)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "three_ways.svg").write_text("\n".join([*drawn, "</svg>\n"]), "utf-8")


if __name__ == "__main__":
    main()
