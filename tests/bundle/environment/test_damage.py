"""A published environment is compared at each use, told what is wrong with, and repaired."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.checks.deep import find_damaged_files
from bundle.environment import damage
from bundle.environment.damage import compare_with_listing
from bundle.environment.unpack import Environment
from bundle.node.node_root import make_secure_root
from bundle.system.files import read_file
from stager.pack.bundle import Packed
from tests.support.bundles import HERE, Pair, left_over, rot, stage, tree
from tests.support.jobs import ask, job_for

SITE = f"lib/python{HERE.python}/site-packages"
MODULE = f"{SITE}/single/__init__.py"


@pytest.fixture(scope="module")
def published(single: Packed, tmp_path_factory: pytest.TempPathFactory) -> object:
    return tree(Path(stage(single, tmp_path_factory.mktemp("published")).path))


@pytest.fixture
def env(single: Packed, base: Path) -> Path:
    return Path(stage(single, base).path)


def rewrite(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


def same_size(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def older(path: Path) -> None:
    """As ``mv`` and ``cp -p`` leave what somebody had elsewhere."""
    same_size(path)
    os.utime(path, (1_600_000_000, 1_600_000_000))


def as_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere.py"))
    path.symlink_to("elsewhere.py")


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def relinked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/tmp")


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "module-deleted": (MODULE, Path.unlink, "it is missing"),
    "module-changed": (MODULE, same_size, "it was written to after it was published"),
    "module-replaced": (MODULE, older, "another, older file is in its place"),
    "module-closed": (MODULE, lambda path: path.chmod(0), "its mode is 0000"),
    "module-a-link": (MODULE, as_a_link, "it is not a file any more"),
    "module-a-pipe": (MODULE, as_a_pipe, "it is not a file any more"),
    "module-executable": (MODULE, lambda path: path.chmod(0o755), "its mode is 0755"),
    "module-planted": (f"{SITE}/torch.py", Path.touch, "it does not belong there"),
    "folder-gone": (f"{SITE}/single", shutil.rmtree, "it is missing"),
    "pyvenv-gone": ("pyvenv.cfg", Path.unlink, "it is missing"),
    "pyvenv-changed": ("pyvenv.cfg", rewrite("home = /usr/bin\n"), "it does not say what it must"),
    "hook-emptied": (f"{SITE}/_stager_imports.py", rewrite(""), "it has 0 bytes, not "),
    "interpreter-gone": ("bin/python", Path.unlink, "it is missing or no link"),
    "programs-gone": ("bin", shutil.rmtree, "it is missing"),
    "link-changed": ("pkgs", relinked, "it is not the symbolic link that it was"),
    "manifest-empty": (".stager/manifest.json", rewrite(""), "manifest.json"),
    "manifest-gone": (".stager/manifest.json", Path.unlink, "it is missing"),
    "head-gone": (".stager/layers", shutil.rmtree, "it is missing"),
    "listing-damaged": (".stager/listing", same_size, "it does not have the digest"),
    "listing-gone": (".stager/listing", Path.unlink, "No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_repaired(
    single: Packed, env: Path, published: object, damage: str
) -> None:
    path, act, why = DAMAGE[damage]
    act(env / path)
    made = stage(single, env.parents[2])
    assert made.mended is not None
    assert not made.reused
    assert path in made.mended.why
    assert why in made.mended.why
    assert tree(env) == published
    assert compare_with_listing(str(env), 1) == []
    assert stage(single, env.parents[2]).reused
    assert left_over(env.parents[2]) == [f"envs/{env.name}"]


@pytest.mark.parametrize("lost", [MODULE, ".stager/listing"])
def test_bytecode_and_the_users_own_files_may_stay(single: Packed, env: Path, lost: str) -> None:
    """Python writes the one where it can; a program may leave the other beside itself."""
    (env / SITE / "single" / "__pycache__" / "other.cpython-39.pyc").touch()
    (env / "project" / "out").mkdir()
    (env / "project" / "out" / "model.pt").write_text("weights")
    assert stage(single, env.parents[2]).reused
    (env / lost).unlink()
    assert stage(single, env.parents[2]).mended is not None
    assert (env / "project" / "out" / "model.pt").read_text() == "weights"


def test_another_job_that_just_renews_the_interpreter_damages_nothing(
    env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes ``pyvenv.cfg``, then the link; it may begin before a look, or right behind one."""
    renewed = env / "pyvenv.cfg"
    whole = renewed.read_bytes()

    def read_and_begin(path: str, *limit: int) -> bytes:
        data = read_file(path, *limit)
        renewed.write_text("of another one")
        return data

    monkeypatch.setattr(damage, "read_file", read_and_begin)
    assert damage.find_interpreter_faults(str(env)) == []
    end = SimpleNamespace(sleep=lambda seconds: renewed.write_bytes(whole))
    monkeypatch.setattr(damage, "time", end)
    assert damage.find_interpreter_faults(str(env)) == []


@pytest.mark.parametrize("kind", ["pipe", "link", "file", "planted"])
def test_something_else_in_its_place_is_replaced(single: Packed, base: Path, kind: str) -> None:
    root = Path(make_secure_root(str(base)))
    place, elsewhere = root / "envs" / single.manifest.id, base / "elsewhere"
    elsewhere.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
        os.mkfifo(root / "incoming" / f"{single.manifest.id}.x")
    elif kind == "link":
        place.symlink_to(elsewhere)
    elif kind == "file":
        place.touch()
    else:
        (place / ".stager").mkdir(parents=True)
        (place / "bin").mkdir()
        (place / "pyvenv.cfg").touch()
        (place / ".stager" / "manifest.json").touch()
    made = stage(single, base)
    assert made.mended is not None
    assert (place / MODULE).is_file()
    assert not place.is_symlink()
    assert os.listdir(elsewhere) == []
    assert left_over(base) == [f"envs/{single.manifest.id}"]


# --- several environments ------------------------------------------------------------------------


def shared(made: Environment) -> Path:
    return Path(made.path, SITE, "steady", "f7.py")


@pytest.mark.parametrize("damage", [same_size, rot])
def test_a_damaged_file_that_two_share_is_repaired_in_both(
    pair: Pair, base: Path, damage: Callable[[Path], Any]
) -> None:
    older, newer = (stage(packed, base) for packed in pair)
    whole = shared(older).read_bytes()
    assert shared(older).stat().st_ino == shared(newer).stat().st_ino
    damage(shared(older))
    if damage is rot:  # nothing shows it but reading; then it is marked in both
        assert find_damaged_files(older.path, 1) != []
    for packed, before in zip(pair, (older, newer), strict=True):
        made = stage(packed, base)
        assert made.mended is not None
        assert "steady/f7.py" in made.mended.why
        assert shared(before).read_bytes() == whole
        assert find_damaged_files(made.path, 1) == []
        assert stage(packed, base).reused


def test_a_sound_copy_of_another_environment_is_linked(pair: Pair, base: Path) -> None:
    older, newer = (stage(packed, base) for packed in pair)
    whole = shared(older).read_bytes()
    shared(newer).unlink()
    shared(newer).write_text("broken\n")
    made = stage(pair[1], base)
    assert made.written == 0
    assert shared(newer).read_bytes() == whole
    assert shared(older).stat().st_ino == shared(newer).stat().st_ino


def test_a_node_says_which_layers_it_lacks(pair: Pair, program: Path, base: Path) -> None:
    """So that only these are sent again: the one with the damage, and not the other one."""
    os.environ["STAGER_NODE_ROOT"] = str(base)
    made = stage(pair[1], base)
    Path(made.path, SITE, "moving", "__init__.py").unlink()
    job = job_for(pair[1], base, bundle="/not/seen/here.tar")
    heads = [layer.head for layer in pair[1].manifest.layers]
    _, (answer,) = ask(program, "preflight", job, heads=heads, wheel=None)
    assert answer["ready"] is False
    assert "moving/__init__.py: it is missing" in answer["damage"]["why"]
    assert [pair[1].manifest.layers[number].name for number in answer["lacks"]] == ["moving"]
    Path(made.path, ".stager", "manifest.json").write_text("")
    _, (answer,) = ask(program, "preflight", job, heads=heads, wheel=None)
    assert answer["lacks"] == [0, 1, 2]
