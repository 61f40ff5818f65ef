"""Visible GPUs, from the variable or from nvidia-smi."""

import pytest

from mpistrat.machine.gpus import visible_gpus


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0,1", ("0", "1")),
        ("3", ("3",)),
        ("GPU-8932f937,GPU-1f", ("GPU-8932f937", "GPU-1f")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_the_variable(text, ids):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == ids


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: A100 (UUID: GPU-1f)'\necho '  MIG 1g Device 0:'\necho 'GPU 1: A100'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_nvidia_smi_lists_them(nvidia_smi):
    assert visible_gpus({}) == ("0", "1")
    nvidia_smi.write_text("#!/bin/sh\necho 'GPU 0: none, the driver is not running'\nexit 9\n")
    assert visible_gpus({}) == ()


def test_a_machine_without_nvidia_s_tools_has_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert visible_gpus({}) == ()
