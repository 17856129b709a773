"""Bundles that exist: opening them, the program inside, and which one is a project's newest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from bundle.format.archive import BundleFile
from bundle.protocol.digest import Digest
from stager.core.errors import BundleError
from stager.core.store import Store
from stager.pack.bundle_file import (
    DAYS,
    Newest,
    clear_away,
    find_newest,
    is_made_here,
    is_marked,
    is_named,
    list_marked,
    list_marks,
    mark,
    node_program,
    open_bundle,
    read_manifest,
    remember,
    unmark,
)
from stager.pack.node_program import make_node_program

NO_BUNDLES = {
    "empty": b"",
    "text": b"not a bundle\n" * 100,
    "zeros": bytes(1 << 16),
    "other tar": b"hello.txt".ljust(1024, b"\0"),
}


@pytest.mark.parametrize("kind", [*NO_BUNDLES, "folder", "absent"])
def test_what_is_no_bundle_is_an_error_with_its_path(kind, tmp_path):
    path = tmp_path / kind
    if kind in NO_BUNDLES:
        path.write_bytes(NO_BUNDLES[kind])
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BundleError) as caught:
        read_manifest(path)
    assert str(path) in caught.value.message
    assert "stager build" in caught.value.hint


def test_damage_found_later_is_a_bundle_error_too(project):
    packed = project.build().packed
    data = bytearray(packed.path.read_bytes())
    data[data.index(make_node_program()) + 100] ^= 1
    packed.path.write_bytes(data)
    with (
        pytest.raises(BundleError, match=r"node\.pyz does not have the digest"),
        open_bundle(packed.path) as bundle,
    ):
        bundle.read_part(bundle.manifest.node)
    for program in project.store.programs.iterdir():  # what the build has left is still whole
        program.unlink()
    with pytest.raises(BundleError, match=r"node\.pyz"):
        node_program(packed.path, project.store)
    assert list(project.store.programs.iterdir()) == []


def test_the_node_program_is_laid_out_once_and_runs(project):
    packed = project.build().packed
    program = node_program(packed.path, project.store)
    assert program.read_bytes() == make_node_program()
    before = program.stat().st_ino
    assert node_program(packed.path, project.store).stat().st_ino == before
    program.write_bytes(b"something else")
    assert node_program(packed.path, project.store).read_bytes() == make_node_program()
    argv = [sys.executable, "-I", "-S", str(program), "unpack", "--help"]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.fixture
def known(store, tmp_path):
    """A bundle that is remembered for the project ``stager.toml``."""
    path, settings = store.bundles / "p-1.pkgs.tar", tmp_path / "stager.toml"
    made = Newest(settings, path, Digest.of(b"id"), Digest.of(b"inputs"))
    path.write_bytes(b"a bundle")
    remember(store, made)
    return made


def test_what_is_remembered_is_found(store, tmp_path, known):
    assert find_newest(store, tmp_path / "stager.toml") == known
    (tmp_path / "alias").symlink_to(tmp_path)
    assert find_newest(store, tmp_path / "alias" / "stager.toml") == known
    assert find_newest(store, tmp_path / "other" / "stager.toml") is None
    known.path.unlink()
    assert find_newest(store, tmp_path / "stager.toml") is None


@pytest.mark.parametrize(
    "note",
    ["", "{", "[]", "{}", "null", '{"bundle": 3, "inputs": "x"}', '{"bundle": "b", "inputs": 3}',
     b"\xff\xfe".decode("latin-1")],
)  # fmt: skip
def test_a_note_that_makes_no_sense_counts_as_none(note, store, tmp_path, known):
    (path,) = store.projects.iterdir()
    assert json.loads(path.read_text())["project"] == str(tmp_path / "stager.toml")
    path.write_text(note, encoding="latin-1")
    assert find_newest(store, tmp_path / "stager.toml") is None


def test_a_bundle_that_another_project_shares_is_named(store, tmp_path, known):
    two, other = tmp_path / "two.toml", known._replace(path=store.bundles / "other.pkgs.tar")
    remember(store, known._replace(settings=two))
    remember(store, other)
    assert is_named(store, known.path)
    remember(store, other._replace(settings=two))
    assert not is_named(store, known.path)


def test_a_bundle_in_use_is_not_cleared_away(project):
    packed = project.build().packed
    with BundleFile(str(packed.path)):
        assert not clear_away(packed.path)
    assert packed.path.exists()
    assert clear_away(packed.path)
    assert not packed.path.exists()
    assert not clear_away(packed.path), "it is gone already"


def test_a_bundle_that_was_carried_here_was_not_made_here(project, tmp_path):
    """Its index is somebody else's word: each of its files is compared while it is unpacked."""
    packed = project.build().packed
    key = packed.manifest.id
    assert is_made_here(project.store, packed.path, key)
    assert not is_made_here(project.store, packed.path, Digest.of(b"another"))
    assert not is_made_here(project.store, tmp_path / "carried.pkgs.tar", key)
    elsewhere = Store(tmp_path / "elsewhere")
    assert not is_made_here(elsewhere, packed.path, key)
    assert not elsewhere.root.exists()


def test_a_stored_file_that_has_become_a_link_to_itself_is_made_again(project):
    packed = project.build().packed
    (name,) = {member.file for member in packed.manifest.external_members if "whl" in member.file}
    whole = (project.store.layers / name).read_bytes()
    (project.store.layers / name).unlink()
    (project.store.layers / name).symlink_to(name)
    assert project.build().packed.path == packed.path
    assert (project.store.layers / name).read_bytes() == whole


# --- Marks of bundles that a batch script names, by the command line and by themselves


DAY = 86400.0


def bundle_in(store, name="lab-0123456789ab.pkgs.tar"):
    path = store.bundles / name
    path.touch()
    return path


def test_a_bundle_that_a_printed_script_names_survives_a_change(project):
    project.settings("alpha", more='[launch]\nlauncher = "processes"').build()
    script = project.stager("script", "--nodes", "2", "--", "train.py")
    assert script.returncode == 0, script.stderr
    [named] = project.store.bundles.glob("*.pkgs.tar")
    assert str(named) in script.stdout

    (project.root / "train.py").write_text("print('changed')\n")
    said = project.stager("exec", "--", "python", "train.py")
    assert said.stdout == "changed\n", said.stderr
    stays = f"replaces {named.name}, which stays: a batch script or a failed job has used it"
    assert stays in said.stderr
    assert named.exists()

    cleaned = project.stager("clean", "--store-only")
    assert "kept: 1 bundle that batch scripts name" in cleaned.stderr, cleaned.stderr
    assert named.exists()
    assert project.stager("clean", "--store-only", "--all").returncode == 0
    assert not re.findall(r"\.pkgs\.tar", "".join(os.listdir(project.store.bundles)))


def test_a_mark_counts_until_the_job_is_over(store):
    bundle, now = bundle_in(store), time.time()
    assert not is_marked(bundle, now)
    assert mark(store, bundle, "4711")
    assert mark(store, bundle, "4712")
    unmark(bundle, "4711")
    assert list_marked(store, now) == [bundle]
    unmark(bundle, "4712")
    assert not is_marked(bundle, now)


def test_a_mark_is_of_one_bundle_in_the_store_for_a_month(store, tmp_path):
    bundle, elsewhere = bundle_in(store), tmp_path / "copy.pkgs.tar"
    elsewhere.touch()
    assert mark(store, bundle)
    assert mark(store, elsewhere)
    assert [*list_marks(tmp_path)] == []
    assert is_marked(bundle, time.time() + (DAYS - 1) * DAY)
    assert not is_marked(bundle, time.time() + (DAYS + 1) * DAY)
    assert not is_marked(bundle_in(store, "lab-fedcba987654.pkgs.tar"), time.time())


def test_what_cannot_be_marked_is_said(store):
    bundle = bundle_in(store)
    (store.root / "tmp").write_text("not a directory")
    assert not mark(store, bundle)
