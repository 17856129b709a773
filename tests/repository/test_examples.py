"""Each example is built into its own bundle and run from it, as its README says, at small size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pictures import digits, nothing, things
from tests.support.processes import start
from tests.support.torch_project import TorchProject

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.network]

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "data", "nodes", "more"),
    [
        ("mlp", nothing, 2, ()),
        # The others on one node: that ranks of two meet and learn is shown elsewhere.
        ("mnist", digits, 1, ()),
        ("cifar10", things, 1, ("--epochs", "1")),
        ("tiny-bert", nothing, 1, ("--epochs", "1")),
    ],
)
def test_an_example(
    torch_project: TorchProject,
    tmp_path: Path,
    name: str,
    data: Callable[[Path], None],
    nodes: int,
    more: tuple[str, ...],
) -> None:
    project = tmp_path / name
    shutil.copytree(REPO / "examples" / name, project)
    (project / "data").mkdir(exist_ok=True)
    data(project / "data")
    # Only the project's layer is new: what it needs is in the store, from the tests before.
    built = torch_project.stager("build", "--json", "--no-prove", cwd=project, timeout=300)
    assert built.returncode == 0, built.stderr
    options = ["--json", "--allocation", "local", *(["--nodes", str(nodes)] if nodes == 1 else [])]
    command = ["--", *_command(project), *more] if more else []
    done = torch_project.stager("run", *options, *command, cwd=project, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["world_size"], report["ok"]) == (2 * nodes, True)
    (trained,) = report["trained"]
    out = project / f"{name.replace('-bert', '')}_out"
    assert trained["path"] == str(out)
    assert trained["metrics"] == json.loads((out / "metrics.json").read_text())
    assert trained["metrics"]["world_size"] == 2 * nodes


def test_the_two_terminal_way_of_the_document(torch_project: TorchProject, tmp_path: Path) -> None:
    """Its lines as they stand there, but for the names of places; each in a shell of its own."""
    verified = torch_project.job("verify", "--nodes", "1", cwd=tmp_path)
    assert verified.code == 0, verified.stderr
    (env,) = torch_project.nodes.glob(f"stager-*/nodes/*1/stager-*/envs/{torch_project.bundle_id}")
    text = (REPO / "docs" / "training.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("export ", "$ENV/bin/"))]
    *settings, first, second = (
        line.replace("/tmp/stager-1000/envs/6f1e...", str(env))
        .replace("eth0", "lo")
        .replace("node01", "127.0.0.1")
        .replace("29500", "29817")
        for line in lines
    )
    commands = [
        f"exec {line} --out {tmp_path}/out{node} --subset 640"
        for node, line in enumerate((first, second))
    ]
    running = [
        start(["sh", "-c", "\n".join([*settings, line])], cwd=tmp_path, env=torch_project.env)
        for line in commands
    ]
    said = [one.communicate(timeout=300) for one in running]
    assert [one.returncode for one in running] == [0, 0], said
    assert json.loads((tmp_path / "out0" / "metrics.json").read_text())["world_size"] == 4


def _command(project: Path) -> list[str]:
    """What the example's own settings launch."""
    from stager.config.load import load

    return list(load(project).project.command)
