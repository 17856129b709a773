"""The Python API: the page about it is run as it stands, and importing it costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stager
from tests.support.building import Project
from tests.support.small_torch import TORCH
from tests.support.wheelhouse import make_wheel

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "python.md"


@pytest.fixture
def ready(project: Project, wheelhouse: Path) -> Project:
    """A project whose ranks a small stand-in for torchrun starts."""
    make_wheel(wheelhouse, "torch", "2.13.0", files=TORCH)
    (project.root / "broken.py").write_text("raise ValueError('no such label')\n")
    return project.settings(
        "alpha", "torch", more='torch-backend = "none"\n[launch]\nbackend = "gloo"'
    )


def run(project: Project, program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in the project's folder."""
    script = project.root.parent / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=project.root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_page_about_it_is_a_program_that_works(ready: Project) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    done = run(ready, "\n".join(blocks))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in (
        "project ('alpha', 'torch')",
        "reused 5 layers; the same bundle: True",
        "local1 ok",
        "local2 ok",
        "ok: True exit codes: {'local1': 0, 'local2': 0}",
        "error: there is no script nosuch.py: neither here nor in the project in the bundle",
        "phase of the job: preflight",
        "phase of the job: probe",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert re.search(r"^rank \d on local\d: python-error: ValueError: no such label$", done.stdout,
                     re.MULTILINE)  # fmt: skip
    assert re.search(r"^\d+ bytes would be freed$", done.stdout, re.MULTILINE)


def test_a_dry_run_that_would_ask_slurm_is_refused_with_the_way_out(
    ready: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready.build()
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("salloc", "sbatch", "srun", "sbcast", "scontrol", "squeue"):
        (commands / name).write_text("#!/bin/sh\necho asked >> asked\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.chdir(ready.root)
    project = stager.load()
    options = stager.JobOptions(
        command=("train.py",), nodes=(2, 2), log_dir=tmp_path / "logs", dry_run=True
    )
    with pytest.raises(stager.StagerError) as caught:
        project.run(options)
    assert "plan()" in caught.value.hint
    planned = project.plan(options)
    assert (planned.argv[0], planned.nodes) == ("sbatch", (2, 2))
    assert not (ready.root / "asked").exists(), "nothing was requested from Slurm"


def test_the_words_of_options_are_checked(ready: Project, tmp_path: Path) -> None:
    project = stager.load(ready.root)
    options = stager.JobOptions(launcher="mpirun", log_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(stager.StagerError, match="'mpirun' is not one of torchrun, srun"):
        project.verify(options)


def test_a_project_that_is_not_there_is_an_error_of_the_package(tmp_path: Path) -> None:
    with pytest.raises(stager.StagerError) as caught:
        stager.load(tmp_path)
    assert "stager init" in caught.value.hint


def test_importing_it_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import stager; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True,
                          cwd=REPO, check=True)  # fmt: skip
    assert set(done.stdout.split()) == {"stager", "__future__"}


def test_every_public_name_is_there() -> None:
    for name in stager.__all__:
        assert getattr(stager, name) is not None
    assert set(stager.__all__) <= set(dir(stager))
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = stager.nothing_of_that_name
