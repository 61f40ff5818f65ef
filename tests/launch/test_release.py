"""The files that are published: the wheel has the package alone, installs and runs; the source distribution has all."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

import mpistrat
from support.documentation import TOP, programs_of
from support.harness.mpi_launcher import Launcher, run_job

VERSION = mpistrat.__version__
SECONDS_PER_COMMAND = 60
# What a package builder does with [build-system], without its download of setuptools.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# torch imports mpistrat_torch, because the wheel has an entry point for it.
FIND = (
    "import sys, torch, mpistrat; print(mpistrat.__file__, sys.modules['mpistrat_torch'].__file__)"
)
DDP = """
import torch.distributed as dist
from torch import nn, ones

dist.init_process_group()
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
model(ones(1, 2) * dist.get_rank()).sum().backward()
print(f"{type(dist.group.WORLD).__name__} {model.module.weight.grad.tolist()}")
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints that must succeed. It finds no module of this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS_PER_COMMAND
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Release:
    """`files`: the names of all files in a copy of this checkout. The other two are built from it."""

    files: set[str]
    sdist: Path
    wheel: Path


def build(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir()
    run(sys.executable, "-c", BUILD.format(kind), folder, cwd=source)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    made_by_tools = (TOP / ".gitignore").read_text().replace("/\n", "\n").split()
    source = folder / "source"
    shutil.copytree(TOP, source, ignore=shutil.ignore_patterns(".git", *made_by_tools))
    files = files_below(source)
    return Release(
        files, build("sdist", source, folder / "sdist"), build("wheel", source, folder / "wheel")
    )


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_a_release_holds(release: Release, tmp_path: Path) -> None:
    """All of the package and nothing else; and the source distribution makes the same wheel."""
    assert release.sdist.name == f"mpistrat-{VERSION}.tar.gz"
    assert release.wheel.name == f"mpistrat-{VERSION}-py3-none-any.whl"
    contents = contents_of(release.wheel)
    package = {name for name in release.files if name.startswith("mpistrat/")}
    metadata = {name for name in contents if name.startswith(f"mpistrat-{VERSION}.dist-info/")}
    assert contents.keys() - metadata == package | {"mpistrat_torch.py"}
    assert "mpistrat/py.typed" in package

    with tarfile.open(release.sdist) as archive:
        # Early releases of Python 3.10 and 3.11 have no filters.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safely)
    unpacked = tmp_path / f"mpistrat-{VERSION}"
    assert release.files <= files_below(unpacked)
    assert contents_of(build("wheel", unpacked, tmp_path / "again")) == contents


def test_metadata_of_a_release(release: Release) -> None:
    """An index accepts it, and the text that it shows has no link to a file of the checkout."""
    contents = contents_of(release.wheel)
    raw = contents[f"mpistrat-{VERSION}.dist-info/METADATA"]
    metadata = Metadata.from_email(raw, validate=True)
    assert (str(metadata.version), metadata.license_expression) == (VERSION, "Apache-2.0")
    assert metadata.license_files == ["LICENSE"]
    assert not [line for line in metadata.classifiers or () if line.startswith("License")]
    description = message_from_bytes(raw).get_payload()
    assert not re.search(r"\]\(", description)
    readme = " ".join((TOP / "README.md").read_text().split())
    for paragraph in description.strip().split("\n\n"):
        assert " ".join(paragraph.split()) in readme, "README says it in other words"


def test_citation_and_changelog_name_the_release() -> None:
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors", "version", "date-released"}
    assert required <= citation.keys()
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["title"], citation["license"]) == ("mpistrat", "Apache-2.0")
    assert all(author.keys() <= {"name"} for author in citation["authors"])
    changelog = (TOP / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)", changelog, re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == f"{citation['version']} ({citation['date-released']})"
    assert citation["version"] == VERSION
    conda = (TOP / "packaging/conda/recipe.yaml").read_text()
    assert f'  version: "{VERSION}"\n' in conda


def test_shell_of_the_apptainer_image(tmp_path: Path) -> None:
    definition = (TOP / "packaging/apptainer/mpistrat.def").read_text()
    assert f"    dist/mpistrat-{VERSION}-py3-none-any.whl /opt/\n" in definition
    assert f"image.version {VERSION}\n" in definition
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", definition, re.MULTILINE))
    assert sections.keys() == {"files", "post", "environment", "runscript", "test", "labels"}
    for name in ("post", "environment", "runscript", "test"):
        script = tmp_path / name
        script.write_text(sections[name])
        run("shellcheck", "--shell=sh", script, cwd=tmp_path)


def test_packages_that_features_need() -> None:
    """docs/getting_started.md names packages of pyproject.toml's extras."""
    page = (TOP / "docs/getting_started.md").read_text()
    table = page.partition("## Packages that some features need")[2].partition("\n## ")[0]
    named = {word for line in re.findall(r"`pip install ([^`]+)`", table) for word in line.split()}
    extras = (TOP / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    known = set(re.findall(r'"([\w-]+)[>=<\d.,]*"', extras.partition("\ntest = ")[0]))
    assert named <= known
    assert len(named) > 10


def environment_with(wheel: Path, folder: Path) -> Path:
    """The `bin` of a new virtual environment with the wheel. It sees the packages of this one, torch among them."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "others.pth").write_text("\n".join(others))
    install = (
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-compile",
        "--no-deps",
        "--ignore-installed",
    )
    run(folder / "bin" / "python", *install, wheel, cwd=folder.parent)
    return folder / "bin"


def test_the_wheel_runs(launcher: Launcher, release: Release, tmp_path: Path) -> None:
    """README's commands and its script, in an environment that has no editable install."""
    tools = environment_with(release.wheel, tmp_path / "environment")
    env = launcher.environment()
    env.pop("PYTHONPATH", None)

    def ranks(number: int, *program: str) -> tuple[str, str]:
        command = launcher.command(number, [str(tools / program[0]), *program[1:]])
        job = run_job(command, env, SECONDS_PER_COMMAND, tmp_path)
        assert job.returncode == 0, job.output
        return job.stdout, job.stderr

    found = run(tools / "python", "-c", FIND, cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(tmp_path / "environment") for file in found)
    assert run(tools / "mpistrat", "--version", cwd=tmp_path) == f"mpistrat {VERSION}\n"
    facts, _ = ranks(1, "mpistrat", "doctor")
    assert f"mpistrat {VERSION} ({tmp_path}" in " ".join(facts.split())

    (tmp_path / "train.py").write_text(programs_of("README.md")[0])
    printed = {ranks(number, "python", "train.py")[0] for number in (1, 2)}
    readme = (TOP / "README.md").read_text()
    assert printed == {f"{line}\n" for line in re.findall(r"`(last loss .*?)`", readme)}

    (tmp_path / "your_ddp.py").write_text(DDP)
    printed, notices = ranks(2, "mpistrat", "run", "your_ddp.py")
    assert printed == "MpistratProcessGroup [[0.5, 0.5]]\n" * 2
    (shown,) = re.findall(r"^```text\n(.*?)^```", readme, re.S | re.M)
    assert notices == shown
