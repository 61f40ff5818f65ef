"""The scripts in slurm/, run by bash: what `srun` would start is written down, or is a stand-in."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "slurm"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.sbatch"))
ENVIRONMENT_LINE = re.compile(
    r"^# (?:<< )?(?:module load [\w ]+; )?source ~/environments/train/bin/activate$", re.MULTILINE
)
# As hooks of modules and of conda do.
READS_WHAT_IS_NOT_SET = 'if [ "$CONDA_BACKUP_X" != "" ]; then :; fi\n'
# The step that starts MPS is executed; the ranks are what RANKS says.
SRUN = """#!/bin/bash
echo "$*" >>"$STEPS"
while [[ $1 == -* ]]; do shift; done
if [[ $1 == bash ]]; then exec "$@"; fi
eval "$RANKS"
"""


class Job:
    """A script that finds stand-ins for commands first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, folder / "steps"
        self.mps = Path(f"/tmp/mps-test-{os.getpid()}")
        self.command("srun", SRUN)

    def command(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, script: Path, env: Mapping[str, str]) -> tuple[int, str]:
        """To its end: the exit code, and all output. As Slurm does then, what is left is told to end."""
        slurm = {"SLURM_JOB_ID": self.mps.name.removeprefix("mps-"), "SLURM_NNODES": "1"}
        found_first = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            ["bash", script, "train.py"],
            cwd=self.folder,
            env={"PATH": found_first, "STEPS": str(self.steps), **slurm, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            # The pipe has an end once all processes have.
            return code, process.communicate(timeout=10)[0]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_script_survives_the_hooks_of_a_site(job: Job, name: str) -> None:
    hook = job.folder / "hook.sh"
    hook.write_text(READS_WHAT_IS_NOT_SET)
    text, count = ENVIRONMENT_LINE.subn(f"source {hook}", (FOLDER / name).read_text())
    assert count == 1
    script = job.folder / name
    script.write_text(text)
    cores = {f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}": "1" for group in (0, 1)}
    array = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"} if "trials" in name else {}
    code, output = job.run(script, {"RANKS": ":", **cores, **array})
    assert code == 0, output
    assert "train.py" in job.steps.read_text()
    after = text[text.index(f"source {hook}") :]
    assert "\nset -u\n" in after.partition("srun")[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_places_for_what_sites_ask(name: str) -> None:
    text = (FOLDER / name).read_text()
    for option in ("account", "partition", "mem"):
        assert re.search(rf"^##?SBATCH --{option}=", text, re.MULTILINE), option
    gpus = re.findall(r"^#SBATCH --gpus-per-node=\d+\n(?:# .*\n)?(.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"##SBATCH --gres=gpu:\d+", line) for line in gpus)
    assert bool(gpus) == ("gpu" in text.partition("\nset ")[0].replace("train.py", ""))
    # MPICH takes the network that the site built it for.
    assert not re.search(r"^export MPIR_CVAR", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("server", "ranks", "code"),
    [
        pytest.param("exit 3", "exec sleep 60", -signal.SIGTERM, id="does not start"),
        pytest.param("exec sleep 0.6", "exec sleep 60", -signal.SIGTERM, id="ends"),
        pytest.param("exec sleep 60", "exit 5", 5, id="outlasts ranks that fail"),
        pytest.param("exec sleep 60", ":", 0, id="outlasts the ranks"),
    ],
)
def test_a_job_ends_with_its_mps(job: Job, server: str, ranks: str, code: int) -> None:
    job.command(
        "nvidia-cuda-mps-control", f'#!/bin/bash\n[[ -d "$CUDA_MPS_PIPE_DIRECTORY" ]] && {server}\n'
    )
    job.command("sleep", '#!/bin/bash\nexec /bin/sleep "${1/#5/0.3}"\n')
    begun = time.monotonic()
    got, output = job.run(FOLDER / "several-ranks-per-gpu.sbatch", {"RANKS": ranks})
    assert got == code, output
    assert time.monotonic() - begun < 10
    assert ("MPS has not started" in output) == (code < 0)
    assert not job.mps.exists()
