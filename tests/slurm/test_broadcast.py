"""What is sent to the nodes, byte by byte, on real Slurm with the real stack."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from hashlib import shake_256
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.slurm_torch import SlurmRan, SlurmTorch
from tests.support.torch_project import REQUIREMENTS, SETTINGS, STAGER, TorchProject
from tests.support.wheelhouse import make_wheel

pytestmark = [pytest.mark.slow, pytest.mark.network]

UPGRADED = "upgraded"
"""A package of the test's own: which versions of others an index has changes from day to day."""
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
# Notes the size of what is sent, and then sends it.
NOTING_SBCAST = """\
#!/bin/sh
for word in "$@"; do case $word in /*) stat -c %s "$word" >>"$SENT"; break ;; esac; done
exec {sbcast} "$@"
"""
SCRIPT = """\
import os
print(f"[RANK {os.environ['RANK']}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
"""


@pytest.fixture(scope="module")
def versions(
    torch_project: TorchProject, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The project's bundle before and after one small package was upgraded."""
    root = tmp_path_factory.mktemp("versions") / "project"
    shutil.copytree(torch_project.root, root)

    def build(version: str) -> Path:
        data = shake_256(version.encode()).digest(100_000)  # far more than the bundle's own parts
        files = {f"{UPGRADED}.py": f"version = {version!r}\n", f"{UPGRADED}.bin": data}
        wheel = make_wheel(root.parent, UPGRADED, version, files=files)
        asked = [*REQUIREMENTS, f"{UPGRADED} @ {wheel.as_uri()}"]
        pinned = SETTINGS.replace(json.dumps(REQUIREMENTS), json.dumps(asked))
        (root / "stager.toml").write_text(pinned)
        output = root.parent / f"{version}.pkgs.tar"
        build = ("build", "--json", "--no-prove", "--output", str(output))
        done = torch_project.stager(*build, cwd=root, timeout=900)
        assert done.returncode == 0, done.stderr
        return output

    return build("1.0"), build("2.0")


@pytest.fixture
def noting(slurm_torch: SlurmTorch) -> tuple[dict[str, str], Path]:
    """Variables with which sbcast notes what it sends, and the file where it does."""
    programs = slurm_torch.work / "programs"
    programs.mkdir()
    own = programs / "sbcast"
    own.write_text(NOTING_SBCAST.format(sbcast=shutil.which("sbcast")))
    own.chmod(0o755)
    sent = slurm_torch.work / "sent"
    path = f"{programs}{os.pathsep}{slurm_torch.env['PATH']}"
    return {"PATH": path, "SENT": str(sent)}, sent


def layers(bundle: Path) -> dict[str, tuple[str, int, int]]:
    """Identity, length in bytes and number of files of each layer, by its name."""
    with tarfile.open(bundle) as tar:
        listed = json.loads(tar.extractfile("manifest.json").read())["layers"]  # type: ignore[union-attr]
        sizes = {member.name: member.size for member in tar.getmembers()}
    return {
        layer["name"]: (
            layer["id"],
            sum(size for name, size in sizes.items() if layer["id"] in name),
            layer["files"],
        )
        for layer in listed
    }


def sent_bytes(sent: Path) -> list[int]:
    return [int(line) for line in sent.read_text().split()] if sent.exists() else []


def inode(slurm_torch: SlurmTorch, node: str, file: str) -> str:
    return slurm_torch.cluster.on(node, ["stat", "-c", "%i", file]).stdout.strip()


def path(ran: SlurmRan, node: str) -> str:
    """Where the environment is."""
    return next(str(one["path"]) for one in ran.events("unpack") if one["node"] == node)


@pytest.mark.full
def test_only_what_is_new_is_sent(
    slurm_torch: SlurmTorch, versions: tuple[Path, Path], noting: tuple[dict[str, str], Path]
) -> None:
    """All of it, then nothing, then the one package that was upgraded."""
    slurm_torch.clean()
    older, newer = versions
    env, sent = noting
    (slurm_torch.work / "script.py").write_text(SCRIPT)

    def run(bundle: Path) -> SlurmRan:
        options = ("--transfer", "sbcast", "--launcher", "srun", "--nproc-per-node", "2")
        ran = slurm_torch.job("run", *options, "--", "script.py", bundle=bundle, env=env)
        assert ran.code == 0, ran.stderr
        assert ran.ranks() == [f"[RANK {rank}] WORLD_SIZE=6" for rank in range(6)]
        return ran

    first = run(older)
    assert first.report["bytes_broadcast"] == older.stat().st_size
    assert sent_bytes(sent) == [older.stat().st_size]

    second = run(older)
    assert (second.report["bytes_broadcast"], second.report["plan"]["bytes"]) == (0, 0)
    assert len(sent_bytes(sent)) == 1
    assert "nothing to send" in second.report["plan"]["why"]

    before, after = layers(older), layers(newer)
    changed = [name for name in after if after[name] != before.get(name)]
    third = run(newer)
    [group] = third.report["plan"]["groups"]
    assert sorted(group["layers"]) == sorted(changed)
    travelled = third.report["bytes_broadcast"]
    assert sent_bytes(sent)[1:] == [travelled] == [third.report["plan"]["bytes"]]
    assert sorted(changed) == ["project", UPGRADED]  # stager.toml is part of the project
    assert travelled <= 1.1 * after[UPGRADED][1]

    files = sum(after[name][2] for name in changed)
    assert [one["files_written"] for one in third.events("unpack")] == [files] * 3
    node = slurm_torch.cluster.nodes[1]
    places = [path(ran, node) for ran in (second, third)]
    for file, linked in (("torch/__init__.py", True), (f"{UPGRADED}.py", False)):
        inodes = [inode(slurm_torch, node, f"{place}/{SITE}/{file}") for place in places]
        assert (inodes[0] == inodes[1]) is linked, file


@pytest.mark.full
def test_a_bundle_that_differs_in_its_manifest_alone(
    cluster: Cluster, shared: Path, slurm_project: Project
) -> None:
    """All layers are on the nodes: the file that is sent holds none."""
    first = verify(slurm_project)
    root = shared / "another-name"
    shutil.copytree(slurm_project.root, root)
    renamed = replace(slurm_project, root=root)
    renamed.build()
    second = verify(renamed)
    assert second["bundle"] != first["bundle"]
    assert second["plan"]["groups"][0]["layers"] == []
    assert second["bytes_broadcast"] == second["plan"]["bytes"] == 1024


def verify(project: Project, *options: str) -> dict[str, Any]:
    """The report of a verify on three nodes that are sent what they lack."""
    logs = ("--log-dir", str(project.root.parent / "logs"))
    done = project.stager("verify", "--json", "--nodes", "3", "--stage", "always", *logs, *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("stage", "said", "travels"),
    [
        ("auto", "3 nodes read the shared bundle: reading", False),
        ("never", "3 nodes to read the shared bundle, as asked for", False),
        ("always", "relay to 3 nodes: sending is asked for", True),
    ],
)
def test_a_plan_and_why(
    cluster: Cluster, slurm_project: Project, stage: str, said: str, travels: bool
) -> None:
    """In an allocation that stands: one line says which way, and a dry run ends with it."""
    (slurm_project.root / "new.bin").write_bytes(os.urandom(1 << 20))
    slurm_project.build()
    logs = str(slurm_project.root.parent / "logs")
    options = ["--dry-run", "--json", "--stage", stage, "--log-dir", logs, "--", "train.py"]
    done = subprocess.run(
        ["salloc", "--nodes=3", STAGER, "run", *options],
        cwd=slurm_project.root,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["why"].startswith(said)
    assert "\n" not in plan["why"]
    assert plan["why"] in done.stderr
    assert (plan["bytes"] > 1 << 20) is travels
    [group] = plan["groups"]
    assert group["nodes"] == list(cluster.nodes)
    assert group["how"] == ("relay" if travels else "shared")
    newest = max((slurm_project.store.root / "bundles").iterdir(), key=os.path.getmtime)
    with tarfile.open(newest) as tar:
        bundle_id = json.loads(tar.extractfile("manifest.json").read())["id"]  # type: ignore[union-attr]
    for node in cluster.nodes:
        made = f"/tmp/stager-0/envs/{bundle_id}"
        assert cluster.on(node, ["test", "-e", made], check=False).returncode == 1
