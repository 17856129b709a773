"""What ``srun`` is given on standard input, which it sends to each task of a step, one by one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.slurm_torch import SlurmTorch

pytestmark = [pytest.mark.slow, pytest.mark.network]

LIMIT = 24 << 10
"""Bytes for each task of a step."""
NOTING_SRUN = """\
#!/bin/bash
name=$(printf '%s\\n' "$@" | sed -n 's/^--job-name=stager-//p')
[ -n "$name" ] || exec {srun} "$@"
exec {srun} "$@" < <(exec tee "$SENT/$name.$$")
"""
SCRIPT = """\
import os
print(f"[RANK {os.environ['RANK']}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
"""


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # All phases are one step, that of verify among them.
        (("run", "--stage", "always", "--launcher", "torchrun", "--", "script.py"), {"preflight"}),
        (("run", "--launcher", "srun", "--", "script.py"), {"preflight", "launch"}),
    ],
    ids=["torchrun", "srun"],
)
def test_a_step_is_given_little(
    slurm_torch: SlurmTorch, options: tuple[str, ...], steps: set[str]
) -> None:
    """All that it is told from its begin to its end, requests of later phases among it."""
    work = slurm_torch.work
    (work / "script.py").write_text(SCRIPT)
    programs, sent = work / "programs", work / "sent"
    for folder in (programs, sent):
        folder.mkdir()
    (programs / "srun").write_text(NOTING_SRUN.format(srun=shutil.which("srun")))
    (programs / "srun").chmod(0o755)
    path = f"{programs}{os.pathsep}{slurm_torch.env['PATH']}"
    ran = slurm_torch.job(*options, env={"PATH": path, "SENT": str(sent)})
    assert ran.code == 0, ran.stderr
    sizes = {file.stem: file.stat().st_size for file in Path(sent).iterdir()}
    assert sizes.keys() >= steps
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}
