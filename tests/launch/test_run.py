"""`mpistrat run`: programs of torch.distributed that were written for torchrun, as they are."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID, LIMIT, SECONDS_TO_END, assert_says_who, reports_in
from launch.preempted_runs import until
from support.clusters import two_nodes
from support.clusters.slurm_cluster import SlurmCluster
from support.documentation import blocks_of
from support.harness.mpi_launcher import Job, Launcher
from support.last_lines import assert_mended_by

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN_SCRIPT = PROGRAMS / "torchrun_script.py"
DDP = PROGRAMS / "ddp_faults.py"
RUN = ("-m", "mpistrat", "run")


def says_once(text: str, ranks: str, backend: str = "mpistrat") -> None:
    """The ranks are said once in a job."""
    assert text.count(f"mpistrat: {ranks}, backend {backend}\n") == 1, text
    assert text.count(", backend ") == 1, text


def line_of(mark: str) -> int:
    """The line of DDP that ends with a comment."""
    lines = DDP.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))


@pytest.mark.both_mpis("launching")
def test_a_script_for_torchrun(launcher: Launcher, tmp_path: Path) -> None:
    words = [tmp_path, "--lr", "-m", "--keep-backend"]
    # So torch knows as little of mpistrat as beside a checkout.
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    job = launcher.run_python(2, *RUN, TORCHRUN_SCRIPT, *words, env=env, cwd=tmp_path)
    assert job.returncode == 0, job.output
    for rank in range(2):
        assert f"rank {rank} is content with ['--lr', '-m', '--keep-backend']\n" in job.stdout
    says_once(job.stderr, "2 ranks on 1 node")


AS_UNDER_PYTHON = """
'The documentation.'
import atexit, multiprocessing, pickle, sys, threading, time
class State:
    pass
def save(when):
    print(when, type(pickle.loads(pickle.dumps(State()))) is State, flush=True)
def late():
    time.sleep(0.2)
    save("thread")
print(__name__, __doc__, __file__, __package__, __cached__, __spec__ and __spec__.name)
print(type(__loader__).__name__, sys.argv, sys.path[0], sys.flags, sys.modules[__name__].State is State)
print("spawned", sys.modules["__mp_main__"].State is State)
atexit.register(save, "exit handler")
threading.Thread(target=late).start()
"""


def test_a_program_finds_itself_as_under_python(tmp_path: Path) -> None:
    """As a file and as a module. Its `__main__` stays until exit handlers have run."""
    (tmp_path / "program.py").write_text(AS_UNDER_PYTHON)
    ways = (("./program.py", "a", "-m"), ("-m", "program", "a"))
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda words: alone(tmp_path, *RUN, *words), ways)
        plain = pool.map(lambda words: alone(tmp_path, *words), ways)
    for run, expected in zip(runs, plain, strict=True):
        assert (run.returncode, run.stderr, run.stdout) == (0, "", expected.stdout)
        assert run.stdout.endswith("thread True\nexit handler True\n")


BEFORE_A_GROUP = """
import os, re, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    assert os.environ[name] == value.replace("RANK", rank), (name, os.environ[name])
mpi, ours = "from mpi4py import MPI", "import mpistrat; mpistrat.MultiWorkerMirroredStrategy()"
for program, env in ((f"{mpi}; {ours}", None), (mpi, dict(os.environ))):
    command = [sys.executable, "-c", f"{program}; print(MPI.COMM_WORLD.allreduce(1))"]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert (child.returncode, child.stdout, child.stderr) == (0, "1\\n", ""), child
mapped = re.findall(r"/dev/shm/(?!mpistrat)\\S+", Path("/proc/self/maps").read_text())
Path(f"mapped{rank}.part").write_text(" ".join(mapped))
Path(f"mapped{rank}.part").rename(f"mapped{rank}")
while not Path("mapped0").exists() or rank == "0":
    time.sleep(0.05)
raise ValueError("my own error")
"""
RANK_AND_SIZE = {
    "MPICH": {
        **{"PMI_RANK": "RANK", "PMI_SIZE": "2"},
        **{"MPI_LOCALRANKID": "RANK", "MPI_LOCALNRANKS": "2"},
    },
    "Open MPI": {
        **{"OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"OMPI_COMM_WORLD_LOCAL_RANK": "RANK", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    },
}


def test_a_program_without_a_group(launcher: Launcher, tmp_path: Path) -> None:
    """It reads its rank from MPI's variables, its children are jobs of one rank, and nothing stays when it fails."""
    (tmp_path / "program.py").write_text(BEFORE_A_GROUP)
    variables = [word for row in RANK_AND_SIZE[launcher.name].items() for word in row]
    job = launcher.run_python(2, *RUN, "program.py", *variables, cwd=tmp_path)
    assert job.returncode != 0, job.output
    assert "ValueError: my own error" in job.stderr, job.output
    assert "AssertionError" not in job.stderr, job.output
    mapped = {
        Path(file) for rank in range(2) for file in (tmp_path / f"mapped{rank}").read_text().split()
    }
    assert mapped
    until(lambda: not any(map(Path.exists, mapped)), f"{mapped} gone", 20)


BY_ITSELF = """
import sys
import torch
import mpistrat as ms
how = sys.argv[1]
if how == "group":
    torch.distributed.init_process_group()
elif how == "strategy":
    ms.MultiWorkerMirroredStrategy()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("ranks", "how", "notices"),
    [(2, "neither", 1), (2, "group", 0), (2, "strategy", 0), (1, "neither", 0)],
)
def test_ranks_that_train_by_themselves(tmp_path: Path, ranks: int, how: str, notices: int) -> None:
    (tmp_path / "program.py").write_text(BY_ITSELF)
    launcher = Launcher.named("MPICH")
    job = launcher.run_python(ranks, *RUN, "program.py", how, forked=True, cwd=tmp_path)
    assert job.returncode == 0, job.output
    said = "an optimizer steps, and torch has no process group"
    assert job.stderr.count(said) == notices, job.output
    if notices:
        assert "each of the 2 ranks trains a model by itself" in job.stderr


KEPT = """
import os, sys
import torch, torch.distributed as dist
assert sys.argv[1:] == ["--keep-backend"], sys.argv
assert sys.path[0] == os.getcwd(), sys.path
assert __name__ == "__main__" and __spec__.name == "kept"
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(f"{dist.get_backend()} of {int(value)}\\n", end="")
dist.destroy_process_group()
"""


def test_a_module_that_keeps_its_backend(launcher: Launcher, tmp_path: Path) -> None:
    """torch's own gloo finds the others at the address and port in the environment."""
    (tmp_path / "kept.py").write_text(KEPT)
    words = ("--keep-backend", "-m", "kept", "--keep-backend")
    job = launcher.run_python(2, *RUN, *words, cwd=tmp_path)
    assert job.returncode == 0, job.output
    assert job.stdout.count("gloo of 2\n") == 2
    says_once(job.stderr, "2 ranks on 1 node", "gloo")


ALONE = """
import os, sys
import torch, torch.distributed as dist
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
assert [os.environ[name] for name in names] == ["0", "1", "0", "1", "0", "1"]
dist.init_process_group("gloo")
value = torch.ones(2)
dist.all_reduce(value)
assert dist.get_backend() == "gloo" and type(dist.group.WORLD).__name__ == "MpistratProcessGroup"
assert value.tolist() == [1, 1]
dist.destroy_process_group()

def fails():
    raise KeyError("wrong")

if sys.argv[1] == "fails":
    fails()
sys.exit(int(sys.argv[1]))
"""


def alone(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Without a launcher and without MPI."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_one_rank_without_mpi(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    ended = alone(tmp_path, *RUN, "alone.py", "3")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "mpistrat: 1 rank on 1 node, backend mpistrat\n"


def test_a_traceback_shows_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    failed = alone(tmp_path, *RUN, "alone.py", "fails")
    assert failed.returncode == 1
    assert re.fullmatch(
        r"mpistrat: 1 rank on .*\n(\[rank0\]: )?Traceback \(most recent call last\):\n"
        r'.*File ".*alone\.py", line \d+, in <module>\n.*    fails\(\)\n'
        r'(.*\^+\n)?.*File ".*alone\.py", line \d+, in fails\n.*raise KeyError\("wrong"\)\n'
        r"(.*\^+\n)?.*KeyError: 'wrong'\n",
        failed.stderr,
    ), failed.stderr


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = alone(tmp_path, *RUN, "nowhere.py")
    assert missing.returncode == 2
    assert f"there is no 'nowhere.py', seen from {tmp_path}\n" in missing.stderr
    missing = alone(tmp_path, *RUN, "-m", "nowhere")
    assert (missing.returncode, missing.stderr) == (1, "ImportError: No module named nowhere\n")


def fault(launcher: Launcher, folder: Path, name: str) -> Job:
    """Run DDP; its rank 1 goes wrong. The job fails in time, and leaves nothing behind."""
    began = time.time()
    env = {"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}"}
    job = launcher.run_python(2, *RUN, DDP, name, env=env, cwd=folder)
    seconds = began + job.seconds - float((folder / "fault").read_text())
    assert job.returncode != 0, job.output
    assert seconds < LIMIT + SECONDS_TO_END, job.output
    assert job.left_behind == (), job.output
    return job


def says(text: str, pattern: str) -> None:
    assert re.search(pattern, text), f"{pattern}\nnot in\n{text}"


DDP_WAITS = (
    r"  rank 0 waits in collective number \d+: all_reduce\(sum, float32, \(72,\)\)\n"
    rf"      at {DDP}:%d in main\n"
)


@pytest.mark.both_mpis("faults")
@pytest.mark.waits
@pytest.mark.parametrize("name", ["stuck", "killed"])
def test_a_rank_of_ddp_that_is_missing(launcher: Launcher, tmp_path: Path, name: str) -> None:
    job = fault(launcher, tmp_path, name)
    (report,) = reports_in(tmp_path)
    assert report in job.stderr
    says(report, DDP_WAITS % line_of("gradients"))
    if name == "killed":
        assert_says_who(job, 1, 2, "SIGKILL")
        says(report, rf"all_reduce\(sum, float32, \(\)\)\n      at {DDP}:{line_of('loss')} in main")
    else:
        says(report, r"\(MPISTRAT_STALL_SECONDS allows 3 s\): rank 1 has not come to it\n")
        says(report, rf"\(innermost call first\)\n      {DDP}:{line_of('stuck')} in goes_wrong\n")
        says(report, rf"\n      {DDP}:\d+ in <module>\n  rank 0 waits")


@pytest.mark.both_mpis("faults")
@pytest.mark.waits
@pytest.mark.parametrize("name", ["shape", "raises"])
def test_a_rank_of_ddp_that_goes_astray(launcher: Launcher, tmp_path: Path, name: str) -> None:
    """torch keeps what is written to sys.stderr while an exception is shown, once there is a group."""
    job = fault(launcher, tmp_path, name)
    if name == "raises":
        says(
            job.stderr,
            rf"mpistrat: rank 1 of 2{HOST_AND_PID} failed; ending the job\nTraceback .*\n"
            rf'  File "{DDP}", line \d+, in <module>\n',
        )
        says(job.stderr, rf'File "{DDP}", line {line_of("raises")}, in goes_wrong\n')
        assert job.stderr.count("\nValueError: wrong on this rank only\n") == 1
        advice = r"goes_wrong \(rank 1\): wrong on this rank only"
        assert_mended_by(job.stderr, rf"{DDP}:{line_of('raises')} in {advice}")
    else:
        says(job.stderr, r"CollectiveMismatchError: the ranks did not call the same collective")
        sides = (("72,", "gradients", "main"), ("5,", "shape", "goes_wrong"))
        for rank, (shape, mark, function) in enumerate(sides):
            says(
                job.stderr,
                rf"  rank {rank}: all_reduce\(sum, float32, \({shape}\)\)\n"
                rf"      at {DDP}:{line_of(mark)} in {function}\n",
            )
        # Rank 0's call fails in a thread that has no frame of the program.
        of_rank_0, of_rank_1 = (f"{line_of(mark)} in {function}" for _, mark, function in sides)
        places = rf"({of_rank_0} \(rank 0\)|{of_rank_1} \(rank 1\))"
        says(
            job.stderr,
            rf"mpistrat: correct {DDP}:{places}: the ranks did not call the same collective ",
        )
    assert reports_in(tmp_path) == ()


WAITS = """
import datetime, sys, time
import torch, torch.distributed as dist
from mpistrat.liveness import processes
from mpistrat.liveness.observer import observation
from mpistrat.liveness.records.record import LIMIT
processes.job_of = lambda pid: ""  # else the ranks of nodes that MPICH makes up would have one observer
timeout, pause, limit = map(float, sys.argv[1:])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
observation.current.record.words[LIMIT] = int(limit * 1e9)  # as if the default were so
rank = dist.get_rank()
dist.barrier()
if rank:
    time.sleep(pause)  # here
began = time.monotonic()
try:
    dist.barrier()
except Exception as error:
    waited = time.monotonic() - began
    assert timeout < waited < timeout + 6, waited
    raise
print(f"rank {rank} goes on\\n", end="", flush=True)
"""
HERE = next(n for n, line in enumerate(WAITS.splitlines(), 1) if line.endswith("# here"))


def wait_in_job(launcher: Launcher, folder: Path, timeout: float, pause: float, **env: str) -> Job:
    """A job whose rank 1 lets rank 0 wait in a group with this timeout; the default limit is 1 s."""
    program = folder / "waits.py"
    program.write_text(WAITS)
    words = map(str, (timeout, pause, 1))
    job = launcher.run_python(2, *RUN, program, *words, env=env, cwd=folder)
    assert job.left_behind == (), job.output
    return job


UNOBSERVED = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)  # differs
if sys.argv[1] == "has a future":
    work.get_future()
time.sleep(1)
if sys.argv[1] == "calls again":
    dist.barrier()
"""


@pytest.mark.parametrize("what", ["ends", "has a future", "calls again"])
def test_an_error_that_nobody_waited_for(launcher: Launcher, tmp_path: Path, what: str) -> None:
    (tmp_path / "unobserved.py").write_text(UNOBSERVED)
    job = launcher.run_python(2, *RUN, "unobserved.py", what, cwd=tmp_path)
    assert job.returncode != 0, job.output
    line = UNOBSERVED[: UNOBSERVED.index("  # differs")].count("\n") + 1
    for rank in range(2):
        called = rf"rank {rank}: all_reduce\(sum, float32, \({3 + rank},\)\)\n *at .*unobserved.py:{line} "
        assert re.search(called, job.output), job.output


LEFT_UNDER_WAY = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(dist.get_rank())
dist.all_reduce(torch.ones(1000), async_op=True)
"""


def test_a_call_that_nobody_waited_for_comes_to_its_end(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT_UNDER_WAY)
    job = launcher.run_python(2, *RUN, "left.py", cwd=tmp_path)
    assert (job.returncode, job.stdout.strip("\0\n")) == (0, ""), job.output
    assert job.stderr.strip("\0\n") == "mpistrat: 2 ranks on 1 node, backend mpistrat", job.output


RECEIVES = """
import torch, torch.distributed as dist
from mpistrat.liveness import deadlines
dist.init_process_group("gloo")
value = torch.ones(1 << 20)
if dist.get_rank() == 0:
    dist.isend(value, 1)
else:
    dist.recv(value, 0)
    print("the first has come")
    deadlines.RANK_WAITS_FOR_BYTES_OF_ENDED_RANK = 2.0
    try:
        dist.recv(value)
    except RuntimeError as error:
        print(error)
    dist.recv(value, 0)  # never sent
"""


@pytest.mark.waits
def test_a_message_from_a_rank_that_has_ended(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "receives.py").write_text(RECEIVES)
    job = launcher.run_python(2, *RUN, "receives.py", cwd=tmp_path)
    assert job.returncode != 0, job.output
    assert "the first has come\n" in job.stdout
    from_any = r"from any rank, .*, but each other rank has come to the end .* Make the matching call on another rank\n"
    assert re.search(from_any, job.stdout), job.output
    line = RECEIVES[: RECEIVES.index("  # never sent")].count("\n") + 1
    waits = rf"rank 1 waits in recv\(float32, \(1048576,\)\) from rank 0, tag 0, at .*receives.py:{line} "
    assert re.search(waits, job.output), job.output
    assert_mended_by(job.stderr, r"\S+ in <module> \(rank 1\): .*Make the matching call on rank 0")
    assert job.seconds < SECONDS_TO_END + 20, job.output


@pytest.mark.waits
def test_the_timeout_of_a_group_is_its_limit(launcher: Launcher, tmp_path: Path) -> None:
    """It is said once for whom a rank waits, and nothing ends."""
    job = wait_in_job(launcher, tmp_path, 60, 4)
    assert job.returncode == 0, job.output
    assert job.stdout.count(" goes on\n") == 2
    assert job.stderr.count("ranks have waited ") == 1
    says(job.stderr, r"\(the timeout of their group is 60 s\): rank 1 has not come to it\n")
    says(job.stderr, rf"\n      \S+waits\.py:{HERE} in <module>\n")
    says(job.stderr, r"\nmpistrat: They go on waiting until then\.\n")


@pytest.mark.waits
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_timeout_of_a_group_passes(tmp_path: Path, nodes: int) -> None:
    """The report comes before the error of the ranks that wait. MPICH makes up the nodes."""
    mpich = Launcher.named("MPICH")
    job = wait_in_job(mpich, tmp_path, 3, 600, MPIR_CVAR_NUM_CLIQUES=str(nodes))
    assert job.returncode != 0, job.output
    says(
        job.stderr,
        rf"(?s)\(the timeout of their group is 3 s\): rank 1 has not come to it\n.*"
        rf"\n      \S+waits\.py:{HERE} in <module>\n.*"
        r"\nmpistrat: Raising StallError on the ranks that wait\.\n.*"
        rf"mpistrat: rank 0 of 2{HOST_AND_PID} failed; ending the job\n.*"
        r"StallError: rank 0 waited \d\.\d s for the other ranks, and the timeout of its group is 3 s\.",
    )
    assert "AssertionError" not in job.stderr


@pytest.mark.waits
def test_a_limit_that_the_user_has_set(launcher: Launcher, tmp_path: Path) -> None:
    """MPISTRAT_STALL_SECONDS is less than the timeout: it holds."""
    job = wait_in_job(launcher, tmp_path, 60, 600, MPISTRAT_STALL_SECONDS="1")
    assert job.returncode != 0, job.output
    says(job.stderr, r"\(MPISTRAT_STALL_SECONDS allows 1 s\): rank 1 has not come to it\n")
    says(job.stderr, r"\nmpistrat: Ending the job\.\n")


ON_TWO_NODES = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
print(type(dist.group.WORLD).__name__, int(value), *map(os.environ.get, names), "\\n", end="")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 4, is_master=False)
store.set(os.environ["RANK"], "here")
store.wait(["0", "1", "2", "3"])
dist.destroy_process_group()
"""


@pytest.mark.both_mpis("launching")
def test_two_nodes(launcher: Launcher, tmp_path: Path) -> None:
    """They meet at an address of the first that the second reaches, by the wire between them."""
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(ON_TWO_NODES)
    with two_nodes.two_nodes(tmp_path) as nodes:
        job = nodes.run_python(launcher, 2, *RUN, program)
    check_two_nodes(job, re.escape(two_nodes.address(1)))
    # No name server answers there, of which torch warns once in a process.
    assert "hostname of the client socket" not in job.output, job.output


@pytest.mark.slurm
def test_srun(slurm: SlurmCluster, tmp_path: Path) -> None:
    """By the script of the page, with two ranks per node in place of four."""
    (shown,) = (b.text for b in blocks_of("docs/torch_distributed.md") if b.text.startswith("#!"))
    script = tmp_path / "job.sh"
    script.write_text(shown)
    (tmp_path / "train.py").write_text(ON_TWO_NODES)
    job = slurm.sbatch(Launcher.named("MPICH"), script, "--ntasks-per-node=2", cwd=tmp_path)
    assert job.wait() == "COMPLETED", job.report()
    check_two_nodes(Job(0, job.output, job.output, 0.0, ()), r"\S+")


def check_two_nodes(job: Job, address: str) -> None:
    assert job.returncode == 0, job.output
    says_once(job.stderr, "4 ranks on 2 nodes")
    for rank in range(4):
        says(job.stdout, rf"MpistratProcessGroup 4 {rank} {rank % 2} 2 {rank // 2} 2 {address} \n")
