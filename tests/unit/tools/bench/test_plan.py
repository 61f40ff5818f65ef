"""`mpistrat-bench plan`: what it predicts from a model, and what it refuses."""

import json
from pathlib import Path

import pytest

from mpistrat.communicators.costs.model import Cost
from mpistrat.tools.bench.command import main
from mpistrat.tools.bench.plan import CostModel, predict

MODEL = CostModel(4, 1 << 20, Cost(10e-6, 0.1e-9, 0.05), Cost(0.0, 0.2e-9, 0.1), 2e-6, 0.08e-9, 0.2)


@pytest.mark.parametrize(
    ("nodes", "nbytes", "microseconds"),
    [
        (1, 1_000_000, 10 + 100),
        (1, 2_000_000, 400),
        (2, 1_000_000, 110 + 2 * 2 + 80),
        (16, 2_000_000, 400 + 8 * 2 + 15 / 8 * 160),
    ],
)
def test_predictions(nodes: int, nbytes: int, microseconds: float) -> None:
    """By hand."""
    row = predict(MODEL, nodes, nbytes, None)
    assert row["predicted"] == pytest.approx(microseconds)
    assert row["ranks"] == 4 * nodes
    assert row["algbw"] == pytest.approx(nbytes / microseconds / 1e3)
    assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (row["ranks"] - 1) / row["ranks"])
    assert row["measured"] is row["off"] is None
    assert predict(MODEL, nodes, nbytes, microseconds / 1.1)["off"] == pytest.approx(0.1)


def test_the_model_is_a_formula() -> None:
    assert MODEL.lines() == [
        "t(S, N) = node(S) + between(S, N), for S bytes on N nodes of 4 ranks",
        "node(S) = 10 us + 0.1 ns S (10 GB/s), fitted within 5 %, up to S = 1048576; then",
        "          0 us + 0.2 ns S (5 GB/s), fitted within 10 %",
        "between(S, N) = 2 ceil(log2 N) 2 us + 2 (N - 1) / N 0.08 ns S (100 Gbit/s per node), fitted within 20 %",
    ]


def test_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within it nothing moves; between such nodes the network is all there is."""
    file = tmp_path / "plan.json"
    network = ["--alpha-us", "2", "--gbit", "100"]
    rest = ["--nodes", "1", "4", "--model-parameters", "25e6", "--json", str(file)]
    assert main(["plan", *network, *rest]) == 0
    content = json.loads(file.read_text())
    assert [row["nodes"] for row in content["rows"]] == [1, 4]
    assert [row["bytes"] for row in content["rows"]] == [100_000_000] * 2
    assert content["rows"][0]["predicted"] == 0
    assert content["rows"][1]["predicted"] == pytest.approx(4 * 2 + 2 * 3 / 4 * 8000)
    assert "as given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "--nodes: must be at least 1"),
        (["--ranks-per-node", "0"], "--ranks-per-node: must be at least 1"),
        (["--size", "4K"], "4096 bytes go through MPI alone"),
        (["--model-parameters", "100"], "400 bytes go through MPI alone"),
        (["--gbit", "100"], "give both or neither"),
        (["--gbit", "0", "--alpha-us", "1"], "--gbit > 0"),
        (["--size", "1M", "--model-parameters", "1e6"], "not allowed with"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one by --alpha-us and --gbit"),
        (["--nodes", "1", "--ranks-per-node", "2"], "start 2 on each node"),
    ],
)
def test_what_one_rank_cannot_tell(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err
