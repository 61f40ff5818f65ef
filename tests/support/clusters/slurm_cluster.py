"""A private Slurm of scripts/mini-slurm: submits jobs, waits for them with a limit, shows the logs if that fails."""

import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.harness.mpi_launcher import Job, Launcher, run_job

MINI_SLURM = Path(__file__).parents[3] / "scripts" / "mini-slurm"
PORTS = 8  # of one instance
CANNOT = 77  # mini-slurm's exit code where there can be no Slurm
SECONDS_TO_INSTALL = 600.0
END_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class NoSlurm(Exception):
    """This machine cannot have one; says why."""


@dataclass(frozen=True)
class SlurmCluster:
    folder: Path
    port: int

    @classmethod
    def start(cls, folder: Path) -> "SlurmCluster":
        cluster = cls(folder, _free_ports())
        started = cluster._mini_slurm("up")
        if started.returncode == CANNOT:
            raise NoSlurm(
                f"needs the Debian packages slurm-wlm and munge, and root: {started.stderr.strip()}"
            )
        if started.returncode:
            raise RuntimeError(f"scripts/mini-slurm up: {started.stdout}{started.stderr}")
        return cluster

    def stop(self) -> None:
        stopped = self._mini_slurm("down")
        if stopped.returncode:
            raise RuntimeError(f"scripts/mini-slurm down: {stopped.stdout}{stopped.stderr}")

    def environment(self, launcher: Launcher, extra: Mapping[str, str] = {}) -> dict[str, str]:
        """For srun, sbatch and what they start: `python` is this one, mpirun and libmpi are the launcher's."""
        env = launcher.environment({"SLURM_CONF": str(self.folder / "slurm.conf"), **extra})
        # UCX's addresses now and then make a line of more than the 1,024 characters that Slurm's PMI reads at a time,
        # and MPICH then fails to start. Those of libfabric are short.
        env = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", **env}
        python = Path(sys.executable).parent
        env["PATH"] = f"{python}{os.pathsep}{env['PATH']}"
        # Inside an allocation there are slots enough, and this policy puts all ranks on its first node.
        env.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
        return env

    def srun(
        self,
        launcher: Launcher,
        *arguments: str | Path,
        seconds: float = 90.0,
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
    ) -> Job:
        """`srun arguments…`, to its end."""
        words = [str(argument) for argument in arguments]
        command = ["srun", "--kill-on-bad-exit", *words]
        return run_job(command, self.environment(launcher, env), seconds, cwd)

    def sbatch(
        self,
        launcher: Launcher,
        script: Path,
        *options: str,
        arguments: Sequence[str | Path] = (),
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
    ) -> "BatchJob":
        """Submit a script; its output goes to a file beside this Slurm's own."""
        output = self.folder / f"job-%j-{random.randrange(10**9)}.out"
        command = ["sbatch", "--parsable", f"--output={output}", *options]
        command += [str(word) for word in (script, *arguments)]
        environment = self.environment(launcher, env)
        job = run_job(command, environment, 60.0, cwd)
        if job.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {job.output}")
        number = job.stdout.strip().split(";")[0]
        return BatchJob(self, number, Path(str(output).replace("%j", number)))

    def run(self, *command: str) -> str:
        """What a Slurm command, such as scontrol, prints."""
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _mini_slurm(self, verb: str) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "MINI_SLURM": str(self.folder), "MINI_SLURM_PORT": str(self.port)}
        return subprocess.run(
            ["bash", str(MINI_SLURM), verb],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_INSTALL,
        )


@dataclass(frozen=True)
class BatchJob:
    slurm: SlurmCluster
    id: str
    output_file: Path

    @property
    def output(self) -> str:
        """What the job has written so far."""
        if not self.output_file.exists():
            return ""
        return self.output_file.read_text(errors="replace")

    def facts(self) -> dict[str, str]:
        """What scontrol says: JobState, ExitCode, Restarts, EndTime and so on."""
        text = self.slurm.run("scontrol", "--oneliner", "show", "job", self.id).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    def wait(self, seconds: float = 120.0, states: set[str] = END_STATES) -> str:
        """Until the job is in one of `states`; which one."""
        end = time.monotonic() + seconds
        while (state := self.state) not in states:
            if time.monotonic() > end:
                text = f"job {self.id} is {state} after {seconds:g} s, expected one of {states}"
                raise TimeoutError(f"{text}\n{self.report()}")
            time.sleep(0.2)
        return state

    def report(self) -> str:
        """All that is known of the job, for the message of a failure."""
        logs = sorted((self.slurm.folder / "log").glob("slurm*.log"))
        tails = [f"{log.name}:\n{_last_lines(log)}" for log in logs]
        facts = [f"{name}={value}" for name, value in self.facts().items()]
        return "\n".join([" ".join(facts), f"output:\n{self.output}", *tails])


def _last_lines(log: Path, count: int = 8) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-count:])


def _free_ports() -> int:
    """The first of PORTS neighbours that nothing listens on."""
    for first in random.sample(range(20000, 30000, PORTS), 100):
        if all(_is_free(port) for port in range(first, first + PORTS)):
            return first
    raise RuntimeError("no 8 free ports in a row were found between 20000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
