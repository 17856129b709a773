"""``stager export --squashfs``: an image that works wherever it is mounted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.building import HOST, STAGER, Project, fetch_zstandard, left_in_tmp
from tests.support.bundles import tree
from tests.support.namespaces import entering
from tests.support.own_pythons import movable_python
from tests.support.processes import run, start
from tests.support.torch_project import TorchProject
from tests.support.wheelhouse import make_wheel

pytestmark = pytest.mark.needs("squashfs")

SAY = """\
import json, multiprocessing, os, subprocess, sys
import helper, imaged, torch

def child():
    import imaged
    return [sys.prefix, imaged.__file__]

def main():
    facts = {
        "prefix": sys.prefix, "path": sys.path, "argv": sys.argv[1:], "helper": helper.__file__,
        "patched": hasattr(torch.cpu, "set_device"), "offline": os.environ["HF_HUB_OFFLINE"],
        "rank": os.environ.get("RANK"), "code": sys.exec_prefix,
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts["child"] = pool.apply(child)
    print(json.dumps(facts))

if __name__ == "__main__":
    main()
"""
TOOL = """\
import subprocess, sys
def main():
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.fixture
def built(project: Project) -> Project:
    """A project with a package that brings a program, and something to patch."""
    wheels = project.root.parent / "wheels"
    wheels.mkdir()
    entry = "[console_scripts]\nimaged-run = imaged:main\n"
    package = make_wheel(wheels, "imaged", files={"imaged.py": TOOL}, entry_points=entry)
    # What the patch is about; the patch itself is tested with the real package.
    files = {
        "torch/__init__.py": "from . import version, cpu\n",
        "torch/version.py": "cuda = None\n",
        "torch/cpu.py": "",
    }
    torch = make_wheel(wheels, "torch", files=files)
    (project.root / "say.py").write_text(SAY)
    (project.root / "src").mkdir()
    (project.root / "src" / "helper.py").write_text("")
    project.locked(package, torch)
    project.expect("build", "--no-prove")
    return project


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Where the machine that mounts the image keeps a node root."""
    folder = tmp_path / "local"
    folder.mkdir()
    return folder


def export(project: Project, image: Path, **env: str) -> dict[str, object]:
    """Export to an image; return what is said of it."""
    return project.report("export", "--squashfs", "-o", str(image), env=env)


def mounted(
    image: Path, place: Path, *argv: object, env: Mapping[str, str], how: str = "mount -o loop,ro"
) -> subprocess.CompletedProcess[str]:
    """Run a command where the image is mounted; the mount is gone when it has ended."""
    place.mkdir(parents=True, exist_ok=True)
    mount = f"{how} {shlex.quote(str(image))} {shlex.quote(str(place))}"
    usual = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/nowhere"}
    return run([*entering("-m", mount), *argv], cwd=Path("/"), env={**usual, **env})


def test_it_holds_what_a_node_unpacks_and_runs_from_any_place(
    built: Project, nodes: Path, tmp_path: Path
) -> None:
    image = tmp_path / "lab.env.sqsh"
    said = export(built, image)
    assert (said["file"], said["bytes"]) == (str(image), image.stat().st_size)
    again = export(built, tmp_path / "again.env.sqsh", TZ="Asia/Tokyo", SOURCE_DATE_EPOCH="1")
    assert again["sha256"] == said["sha256"]
    built.root.joinpath("later.py").touch()
    done = built.stager("export", "--squashfs", "--json", "--id", str(said["id"]))
    assert json.loads(done.stdout)["sha256"] == said["sha256"], "the one that is named"
    built.root.joinpath("later.py").unlink()

    env = {"STAGER_NODE_ROOT": str(nodes)}
    copy = tmp_path / "copy"
    done = mounted(image, tmp_path / "first", "cp", "-a", tmp_path / "first", copy, env=env)
    assert done.returncode == 0, done.stderr
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    where = {"STAGER_NODE_ROOT": str(unpacked)}
    done = built.stager("exec", "--", "sh", "-c", "echo $STAGER_ENV", env=where)
    in_image, on_node = tree(copy), tree(Path(done.stdout.strip()))
    for name in ("bin/python", "pyvenv.cfg"):
        on_node.pop(name)
    own = {name: in_image.pop(name) for name in ("bin/python", "run", ".stager/node.pyz")}
    assert in_image == on_node
    assert [mode for mode, _ in own.values()] == ["755", "755", "644"]
    assert {path.stat().st_mtime for path in copy.rglob("*.py")} == {315532800}

    site = f"lib/python{HOST.python}/site-packages"
    for place, command in (
        ("first", ("run", "python", "{}/project/say.py", "a b")),
        ("second place", ("run", "say.py", "a b")),
        ("first", ("bin/python", "{}/project/say.py", "a b")),
        ("first", ("run", "imaged-run", "{}/project/say.py", "a b")),
    ):
        at = tmp_path / place
        words = [word.format(at) for word in command]
        done = mounted(image, at, at / words[0], *words[1:], env={**env, "RANK": "3"})
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["argv"] == ["a b"]
        assert (facts["patched"], facts["offline"], facts["rank"]) == (True, "1", "3")
        assert facts["helper"] == f"{at}/project/src/helper.py" or place == "second place"
        assert facts["child"] == [facts["prefix"], f"{facts['prefix']}/{site}/imaged.py"]
        assert os.path.realpath(facts["child"][1], strict=False).startswith(str(tmp_path))
        assert not any("dist-packages" in entry for entry in facts["path"])
        assert "patch applied: torch-cpu-set-device" in done.stderr
    assert len(list((nodes / f"stager-{os.geteuid()}" / "jobs").iterdir())) == 2
    assert left_in_tmp(built.store) == []


def test_modes_do_not_come_from_the_umask_or_the_offline_root(
    built: Project, tmp_path: Path
) -> None:
    """All of it is root's: under umask 077 nobody else could have read it."""
    said = export(built, tmp_path / "lab.env.sqsh")
    built.store.root.chmod(0o2700)  # what is made in it gets its group, and the bit
    before = os.umask(0o077)
    try:
        again = export(built, tmp_path / "again.env.sqsh")
    finally:
        os.umask(before)
    assert again["sha256"] == said["sha256"]
    listed = ["unsquashfs", "-lln", str(tmp_path / "again.env.sqsh")]
    done = subprocess.run(listed, capture_output=True, text=True, check=True)
    modes = {line.split()[0] for line in done.stdout.splitlines() if " 0/0 " in line}
    assert modes == {"drwxr-xr-x", "-rwxr-xr-x", "-rw-r--r--", "lrwxrwxrwx"}


def test_it_starts_itself_by_no_accident(built: Project, nodes: Path, tmp_path: Path) -> None:
    """Its own programs come first on ``PATH``: none of them is taken for the node's Python."""
    image, at = tmp_path / "lab.env.sqsh", tmp_path / "at"
    export(built, image)
    env = {"STAGER_NODE_ROOT": str(nodes), "PATH": f"{at}/bin:{os.environ['PATH']}"}
    done = mounted(image, at, "python3", "-c", "import sys; print(sys.prefix)", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(nodes))
    # An image in an image, as in a shell that somebody has started in one.
    done = mounted(image, at, at / "run", "sh", "-c", "python3 -c 'import imaged'", env=env)
    assert done.returncode == 0, done.stderr
    nowhere = {"STAGER_NODE_ROOT": str(nodes), "PATH": f"{at}/bin"}
    argv = ("/bin/sh", f"{at}/run", "absent-program")
    done = mounted(image, at, *argv, env={**nowhere, "PATH": "/usr/bin:/bin:/sbin:/usr/sbin"})
    assert done.returncode == 127
    assert "cannot run absent-program" in done.stderr


@pytest.mark.full
def test_a_python_of_its_own_needs_none_there(
    project: Project, nodes: Path, pip_settings: Mapping[str, str], tmp_path: Path
) -> None:
    own = movable_python()
    fetch_zstandard(own.target.python, project.store.wheels, pip_settings)
    project.locked(make_wheel(tmp_path, "imaged"), more=f'interpreter = "{own.prefix}"\n')
    text = (project.root / "stager.toml").read_text()
    wanted = f'[environment]\npython = "{own.target.python}"\n'
    (project.root / "stager.toml").write_text(text.replace("[environment]\n", wanted))
    done = project.expect("build", "--no-prove")
    image, at = tmp_path / "own.env.sqsh", tmp_path / "at"
    assert export(project, image)["brings_python"] is True
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "realpath"):  # and no Python
        (tools / name).symlink_to(shutil.which(name) or name)
    code = "import sys, imaged; print(sys.version.split()[0], sys.base_prefix)"
    env = {"STAGER_NODE_ROOT": str(nodes)}
    inner = f"PATH={shlex.quote(str(tools))} {at}/run python -c {shlex.quote(code)}"
    ended = f"code=$?; umount {at}; exit $code"  # and the server of a mount in user space with it
    how = "squashfuse" if Path("/dev/fuse").exists() else "mount -o loop,ro"
    done = mounted(image, at, "sh", "-c", f"{inner}; {ended}", env=env, how=how)
    assert done.returncode == 0, done.stderr
    version, prefix = done.stdout.split()
    assert version.startswith(f"{own.target.python}.")
    assert prefix == f"{at}/python"


def test_what_is_wrong_is_said_and_leaves_nothing(built: Project, tmp_path: Path) -> None:
    image = tmp_path / "out" / "lab.env.sqsh"
    image.parent.mkdir()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "unshare").symlink_to("/usr/bin/unshare")

    def fails(**env: str) -> str:
        done = built.stager("export", "--squashfs", "-o", str(image), env=env)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert list(image.parent.iterdir()) == []
        assert left_in_tmp(built.store) == []
        return done.stderr

    old = bare / "mksquashfs"
    why = 'Compressor "zstd" is not supported!'
    old.write_text(f"#!/bin/sh\nhead -c 99 /dev/zero >$2; echo '{why}' >&2; exit 1\n")
    old.chmod(0o755)
    said = fails(PATH=f"{bare}:{os.environ['PATH']}")
    assert "mksquashfs failed" in said
    assert why in said
    absent = built.expect(
        "export", "--squashfs", "-o", str(tmp_path / "absent" / "x.env.sqsh"), code=1
    )
    assert "cannot be written: No such file or directory" in absent.stderr
    inside = built.stager("export", "--squashfs", "-o", "mine.sqsh")
    assert "let its name end in .env.sqsh" in inside.stderr


def test_a_full_disk_and_a_missing_tool(built: Project, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=64k none {shlex.quote(str(place))}"
    argv = [*entering("-m", mount), "sh", "-c"]
    export_there = shlex.join([*STAGER, "export", "--squashfs", "-o", f"{place}/x.env.sqsh"])
    inner = f"{export_there}; ls -A {place}"
    done = run([*argv, inner], cwd=built.root)
    assert "No space left on device" in done.stderr
    assert done.stdout == ""
    hidden = "mount --bind /dev/null /usr/bin/mksquashfs"
    done = run([*entering("-m", hidden), *STAGER, "export", "--squashfs"], cwd=built.root)
    assert done.returncode == 1
    assert "--squashfs needs mksquashfs, which is not on PATH" in done.stderr
    assert "squashfs-tools" in done.stderr
    assert "Unpacking" not in done.stderr


def test_ctrl_c_leaves_nothing(built: Project, tmp_path: Path) -> None:
    """The image is being written when its user has had enough."""
    folder = tmp_path / "bin"
    folder.mkdir()
    begun = tmp_path / "begun"
    tool = folder / "mksquashfs"
    os.mkfifo(begun)
    tool.write_text(
        f"#!/bin/sh\ncase $1 in */empty) exit 0;; esac\necho >{begun}; exec sleep 300\n"
    )
    tool.chmod(0o755)
    place = tmp_path / "out"
    place.mkdir()
    argv = [*STAGER, "export", "--squashfs", "-o", place / "x.env.sqsh"]
    path = f"{folder}:{os.environ['PATH']}"
    process = start(argv, cwd=built.root, env={**os.environ, "PATH": path})
    with begun.open() as opened:
        opened.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode in (130, -signal.SIGINT), errors
    assert list(place.iterdir()) == []
    assert left_in_tmp(built.store) == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.network
def test_two_ranks_of_pytorch_train_from_an_image(
    torch_project: TorchProject, nodes: Path, tmp_path: Path
) -> None:
    """The image's own script by its name, and the trainer, each started by its torchrun."""
    image, at, out = tmp_path / "torch.env.sqsh", tmp_path / "at", tmp_path / "out"
    done = torch_project.stager("export", "--squashfs", "-o", image)
    assert done.returncode == 0, done.stderr
    at.mkdir()
    two = f"{at}/run torchrun --standalone --nproc-per-node 2"
    commands = (
        f"{two} --no-python {at}/run train.py one two",
        f"{two} -m trainer mlp --epochs 1 --out {shlex.quote(str(out))}",
    )
    env = {"STAGER_NODE_ROOT": str(nodes)}
    done = mounted(image, at, "sh", "-euc", "\n".join(commands), env=env)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[RANK {rank}] WORLD_SIZE=2" in done.stdout
    assert done.stdout.count("sum of ranks: 1.0 arguments: ['one', 'two']") == 2
    assert json.loads((out / "metrics.json").read_text())["world_size"] == 2
