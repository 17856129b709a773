"""The air gap with the real thing: PyTorch carried over, trained with on two hosts, and updated."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stager.pack.bundle_file import read_manifest
from tests.support.air_gap import NODES, NOT_THERE, Inside, export
from tests.support.namespaces import REPO
from tests.support.ssh_hosts import SshHosts
from tests.support.torch_project import REQUIREMENTS, TorchProject
from tests.support.wheelhouse import make_wheel

pytestmark = [pytest.mark.slow, pytest.mark.network]

SMALL = "stager-tests-small"
"""A small package of the lab's own, which no index has."""
SETTINGS = f"""\
[environment]
requirements = {json.dumps([*REQUIREMENTS, SMALL])}
torch-backend = "cpu"

[project]
name = "lab"
outputs = ["out"]

[launch]
nproc-per-node = 1
"""
TRAIN = ("-m", "trainer", "tiny-bert", "--data", "data/sentences.csv", "--vocab", "data/vocab.txt")
SHORT = ("--subset", "64", "--held-out", "32", "--epochs", "1", "--out", "out")
HOSTS = ("--hosts", NODES, "--nodes", "2")


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The project on the machine with the index, in the offline root that has PyTorch."""

    folder: Path
    torch: TorchProject

    @property
    def lab(self) -> Path:
        """The project: the example's data, with the lock that was made for the other tests."""
        return self.folder / "lab"

    def make(self) -> None:
        """Write it; its package is in a folder of wheels."""
        self.lab.mkdir(parents=True)
        (self.folder / "wheels").mkdir()
        shutil.copytree(REPO / "examples" / "tiny-bert" / "data", self.lab / "data")
        (self.lab / "stager.toml").write_text(SETTINGS)
        (self.lab / "pylock.toml").write_bytes((self.torch.root / "pylock.toml").read_bytes())
        self.release("1.0")

    def release(self, version: str) -> None:
        """Make a version of the small package; the latest is picked.

        Its layer is large beside the lock and the manifest of all packages, which come along.
        """
        noise = random.Random(version).randbytes(700_000)
        files = {"small/__init__.py": f"VERSION = {version!r}\n", "small/data": noise}
        make_wheel(self.folder / "wheels", SMALL, version, files=files)

    def export(self, name: str, *arguments: str) -> tuple[Path, dict[str, Any]]:
        """Build, and write what is carried."""
        links = f"{self.torch.env.get('PIP_FIND_LINKS', '')} {self.folder / 'wheels'}"
        built = self.torch.stager(
            *("build", "--no-prove", "--json", "-P", SMALL),
            cwd=self.lab,
            env={"PIP_FIND_LINKS": links.strip()},
        )
        assert built.returncode == 0, built.stderr
        file = self.folder / name
        exported = export(self.lab, file, *arguments, env=self.torch.env)
        return file, {**json.loads(built.stdout), **exported}


@pytest.fixture
def outside(hosts: SshHosts, torch_project: TorchProject) -> Iterator[Outside]:
    """The project, where no host sees it; its bundles are gone afterwards."""
    folder = hosts.hidden / "torch-outside"
    bundles = Path(torch_project.env["OFFLINE_ROOT"], "bundles")
    before = set(bundles.iterdir())
    made = Outside(folder=folder, torch=torch_project)
    try:
        made.make()
        yield made
    finally:
        shutil.rmtree(folder)
        for path in set(bundles.iterdir()) - before:
            path.unlink()


@pytest.mark.full
def test_torch_is_carried_and_trained_with(outside: Outside, inside: Inside) -> None:
    """Install, import, verify, train; then a package that changed, and nothing else."""
    assert inside.run("python3", "-c", NOT_THERE).stdout == "[] []\n"
    file, first = outside.export("lab.carry.tar", "--with-tool")
    carried = inside.carry(file)
    file.unlink()
    installed = inside.run("python3", carried, "install")
    assert installed.returncode == 0, installed.stderr
    imported = inside.stager("import", carried, "--project", inside.lab, "--id", first["id"])
    assert imported["notes"] == []
    inside.seen(carried).unlink()
    verified = inside.stager("verify", *HOSTS, "--id", first["id"])
    assert [node["ok"] for node in verified["nodes"]] == [True, True]
    assert {node["packages"]["torch"].partition("+")[0] for node in verified["nodes"]} == {"2.13.0"}

    # Each host trains on the rows that the bundle brought, as it does not see the lab's folder.
    ran = inside.stager("run", "--id", first["id"], *HOSTS, "--", *TRAIN, *SHORT, cwd=inside.lab)
    assert (ran["nodes"], ran["world_size"], ran["bytes_broadcast"]) == (NODES.split(","), 2, 0)
    assert metrics(inside)["world_size"] == 2
    assert metrics(inside)["train_rows"] == 64

    outside.release("2.0")
    file, second = outside.export("more.carry.tar", "--base", first["id"][:12])
    layers = read_manifest(Path(second["bundle"])).layers
    size = next(layer.size for layer in layers if layer.name == SMALL)
    assert second["layers"] == 1
    assert file.stat().st_size <= 1.1 * size
    inside.stager("import", inside.carry(file), "--id", second["id"])
    ran = inside.stager("run", "--id", second["id"], *HOSTS, "--", "-m", "trainer", "mlp")
    assert ran["world_size"] == 2
    assert ran["bytes_broadcast"] <= 1.1 * size


def metrics(inside: Inside) -> Mapping[str, Any]:
    """What the first rank wrote, brought home."""
    text = inside.seen(inside.lab / "out" / "metrics.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found
