"""Across an air gap, onto two real hosts: outside an index, inside one file and a plain Python.

One of the hosts is the login node inside: its network leads to the other hosts and nowhere else,
and what this machine has of pip, uv and stager cannot be seen there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stager.core.store import Store
from stager.pack.bundle_file import read_manifest
from tests.support.air_gap import NODES, NOT_THERE, Inside, export
from tests.support.building import Project, Supplies
from tests.support.ssh_hosts import SshHosts
from tests.support.wheelhouse import make_wheel

SETTINGS = """
[project]
name = "lab"
outputs = ["out"]

[launch]
launcher = "processes"
backend = "gloo"
"""
TRAIN = """\
import os, pathlib
import alpha

if os.environ["RANK"] == "0":
    pathlib.Path("out").mkdir(exist_ok=True)
    pathlib.Path("out/ran.txt").write_text(f"{os.environ['WORLD_SIZE']} {alpha.VERSION} FIRST")
"""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The machine with the index."""

    project: Project
    tool_env: Mapping[str, str]
    """Variables with which the tool's own packages are found."""

    def export(self, name: str, *arguments: str) -> tuple[Path, dict[str, Any]]:
        """Build, and write what is carried."""
        built = self.project.stager("build", "--upgrade", "--json")
        assert built.returncode == 0, built.stderr
        file = self.project.root.with_name(name)
        exported = export(self.project.root, file, *arguments, env=self.tool_env)
        return file, {**json.loads(built.stdout), **exported}


@pytest.fixture
def outside(
    hosts: SshHosts,
    index_env: dict[str, str],
    supplies: Supplies,
    own_place: None,
    pip_settings: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Outside]:
    """The project and its store, where no host sees them."""
    folder = hosts.hidden / "outside"
    (folder / "lab").mkdir(parents=True)
    (folder / "lab" / "train.py").write_text(TRAIN)
    monkeypatch.setenv("OFFLINE_ROOT", str(folder / "offline"))
    project = Project(root=folder / "lab", store=supplies.put_into(Store(folder / "offline")))
    without_index = {name: value for name, value in os.environ.items() if name not in index_env}
    try:
        yield Outside(
            project=project.settings("alpha", more=SETTINGS),
            tool_env={**without_index, **pip_settings},
        )
    finally:
        shutil.rmtree(folder)


@pytest.mark.full
def test_from_nothing_to_two_nodes(outside: Outside, inside: Inside, wheelhouse: Path) -> None:
    """Install, import, verify, train; edit and build there; then only what is new."""
    assert inside.run("python3", "-c", NOT_THERE).stdout == "[] []\n"
    file, first = outside.export("lab.carry.tar", "--with-tool")
    carried = inside.carry(file)
    installed = inside.run("python3", carried, "install")
    assert installed.returncode == 0, installed.stderr
    imported = inside.stager("import", carried, "--project", inside.lab, "--id", first["id"])
    assert (imported["project"], imported["notes"]) == (str(inside.lab), [])
    hosts = ("--hosts", NODES, "--nodes", "2")
    verified = inside.stager("verify", *hosts, "--id", first["id"])
    assert [node["ok"] for node in verified["nodes"]] == [True, True]
    train = (*hosts, "--nproc-per-node", "1", "--", "train.py")
    ran = inside.stager("run", "--id", first["id"], *train, cwd=inside.lab)
    assert (ran["nodes"], ran["world_size"]) == (NODES.split(","), 2)
    assert result(inside) == "2 1.0 FIRST"

    # The code is changed there; neither an index nor a wheel is needed.
    script = inside.seen(inside.lab / "train.py")
    script.write_text(script.read_text().replace("FIRST", "EDITED"))
    built = inside.stager("build", cwd=inside.lab)
    assert (built["proved"], built["layers_built"]) == (True, 2)  # the project and the trainer
    inside.stager("run", *train, cwd=inside.lab)
    assert result(inside) == "2 1.0 EDITED"

    # Outside a package changes: only that is carried, and sent to the nodes.
    noise = {
        "alpha/__init__.py": "VERSION = '9.0'\n",
        "alpha/data": random.Random(5).randbytes(400_000),
    }
    make_wheel(wheelhouse, "alpha", "9.0", files=noise)
    file, second = outside.export("more.carry.tar", "--base", first["id"][:12])
    manifest = read_manifest(Path(second["bundle"]))
    layer = next(layer for layer in manifest.layers if layer.name == "alpha")
    assert second["layers"] == 1
    assert file.stat().st_size <= 1.1 * layer.size
    cut = file.with_name("cut.carry.tar")
    cut.write_bytes(file.read_bytes()[:-1000])
    assert "ends too early" in inside.refusal("import", inside.carry(cut))
    assert "does not carry the bundle" in inside.refusal("import", carried, "--id", second["id"])
    inside.stager("import", inside.carry(file), "--id", second["id"])
    ran = inside.stager("run", "--id", second["id"], *train, cwd=inside.lab)
    assert result(inside) == "2 9.0 FIRST"
    assert ran["bytes_broadcast"] <= 1.1 * layer.size


def result(inside: Inside) -> str:
    """What the first rank wrote, brought home; it is removed, as the next goes beside it."""
    out = inside.seen(inside.lab / "out")
    text = (out / "ran.txt").read_text()
    shutil.rmtree(out)
    return text
