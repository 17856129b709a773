"""Cleaning the offline root: what some project needs, or somebody uses, is never in the way."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile
from bundle.format.manifest import FORMAT, MANIFEST_NAME, count_padding, member_header
from bundle.protocol.codec import encode
from bundle.protocol.digest import Digest, canonical_json
from stager import cleanup
from stager.cleanup import CleanedItem, Rules, StoreCleanup, apply, list_kept_environments, plan
from stager.core.errors import StagerError
from stager.core.store import Store
from stager.pack.bundle_file import mark, node_program, unmark
from tests.support.building import Project, digests, left_behind, left_in_tmp
from tests.support.wheelhouse import make_wheel

DAYS = 3 * 86400.0


def later() -> float:
    """A time at which whatever is there now has not been used for days."""
    return time.time() + DAYS


def names(items: Iterable[CleanedItem]) -> set[tuple[str, str]]:
    return {(item.kind, item.path.name) for item in items}


def sweep(store: Store, **rules: object) -> StoreCleanup:
    """Clean after some days; the plan must have said the same, and touched nothing."""
    before = digests(store.root)
    now, chosen = later(), Rules(**rules)  # type: ignore[arg-type]
    planned = plan(store, chosen, now)
    assert digests(store.root) == before
    done = apply(store, chosen, now)
    assert names(done.removed) | names(item for item, _ in done.left) == names(planned)
    return done


def rebuilt(project: Project) -> tuple[Path, Path]:
    """Two builds of the project, with another file in between: the old bundle, and the new one."""
    old = project.build().packed.path
    (project.root / "train.py").write_text("print('changed')\n")
    return old, project.build().packed.path


def other_project(project: Project, *requirements: str) -> Project:
    """A second project that uses the same store."""
    root = project.root.with_name("other")
    root.mkdir()
    (root / "main.py").write_text("print('other')\n")
    return Project(root=root, store=project.store).settings(*requirements)


def test_an_old_bundle_goes_with_what_only_it_needed(project: Project) -> None:
    old, new = rebuilt(project)
    with BundleFile(str(old)) as first, BundleFile(str(new)) as second:
        needed, mine = ({layer.id for layer in one.manifest.layers} for one in (second, first))
    (only,) = mine - needed
    size = old.stat().st_size
    used_today = plan(project.store, Rules(), time.time())
    own = {("bundle", old.name), ("seal", f"{old.name}.txt")}
    assert names(used_today) == own, "what was used today stays"
    done = sweep(project.store)
    assert names(done.removed) == {*own, ("layer", f"{only}.tar.zst")}
    (bundle,) = [item for item in done.removed if item.kind == "bundle"]
    assert encode(bundle) == {
        "place": "offline root", "path": str(old), "bytes": size, "kind": "bundle",
        "why": "it is not a project's newest bundle",
    }  # fmt: skip
    assert sum(item.bytes for item in done.removed) > size
    again = project.build()
    assert (again.packed.path, again.packed.reused, again.made.built) == (new, True, 0)
    assert sweep(project.store).removed == []


def test_what_is_in_use_stays_with_its_layers_and_its_program(project: Project) -> None:
    """With those of its layers that are there."""
    old, _ = rebuilt(project)
    program = node_program(old, project.store)
    with BundleFile(str(old)) as held:
        gone, *layers = held.manifest.layers
        project.store.layer(gone.id).unlink()
        assert sweep(project.store).removed == []
        assert all(project.store.layer(layer.id).exists() for layer in layers)
    assert program.exists()
    assert ("bundle", old.name) in names(sweep(project.store).removed)


def test_layers_stay_where_a_bundle_could_not_be_removed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have opened it since the plan was made."""
    rebuilt(project)
    monkeypatch.setitem(cleanup._REMOVALS, "bundle", lambda path: False)
    done = sweep(project.store)
    assert {item.kind for item, _ in done.left} == {"bundle", "layer"}
    assert "layer" not in {item.kind for item in done.removed}


def test_a_project_whose_folder_is_gone_needs_nothing(project: Project) -> None:
    mine = project.build().packed.path
    other = other_project(project, "beta")
    theirs = other.build().packed.path
    node_program(theirs, project.store)
    assert sweep(project.store).removed == []
    shutil.rmtree(other.root)
    found = names(sweep(project.store).removed)
    assert {("bundle", theirs.name), ("seal", f"{theirs.name}.txt")} < found
    assert {kind for kind, _ in found} == {"note", "bundle", "seal", "layer"}  # one program: shared
    assert mine.exists()
    assert len(list(project.store.projects.iterdir())) == 1
    assert project.build().packed.reused


def test_two_projects_that_share_a_bundle_keep_it(project: Project) -> None:
    made = project.settings("alpha", more='[project]\nname = "both"').build().packed.path
    copy = project.root.with_name("copy")
    shutil.copytree(project.root, copy)
    assert Project(root=copy, store=project.store).build().packed.path == made
    shutil.rmtree(project.root)
    assert names(sweep(project.store).removed).isdisjoint({("bundle", made.name)})
    assert made.exists()


def test_to_look_at_a_layer_is_not_to_use_it(project: Project) -> None:
    """A dry run would keep for a day what it lists, as reading a file changes its access time."""
    rebuilt(project)
    layers = sorted((project.store.root / "layers").iterdir())
    long_ago = time.time() - DAYS
    for path in layers:
        os.utime(path, (long_ago, long_ago))
    first = plan(project.store, Rules(), time.time())
    assert [path.stat().st_atime for path in layers] == pytest.approx([long_ago] * len(layers))
    assert any(item.kind == "layer" for item in first)
    assert plan(project.store, Rules(), time.time()) == first


def test_newest_bundles_go_on_request_but_the_locks_layers_stay(project: Project) -> None:
    built = project.build()
    done = sweep(project.store, keep_newest=False)
    kinds = {kind for kind, _ in names(done.removed)}
    assert kinds == {"bundle", "seal", "layer", "program"}
    wheels = [layer for layer in built.packed.manifest.layers if layer.kind == "wheel"]
    assert wheels
    assert all(project.store.layer(layer.id).exists() for layer in wheels)
    again = project.build(offline=True)
    assert again.packed.path == built.packed.path
    assert again.made.reused == len(wheels)


def test_what_a_bundle_of_a_newer_version_needs_is_not_known(project: Project) -> None:
    """In a store that is shared by users of several versions."""
    path = project.build().packed.path
    newer = canonical_json({"format": FORMAT + 1, "id": "0" * 64})
    path.write_bytes(
        member_header(MANIFEST_NAME, len(newer)) + newer + bytes(count_padding(len(newer)))
    )
    kinds = {item.kind for item in plan(project.store, Rules(), later())}
    assert kinds.isdisjoint({"bundle", "layer", "program"})


def test_the_bundle_of_a_job_in_the_queue_or_of_another_user_stays_in_any_case(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are the members of a group that shares the store."""
    path, rules = project.build().packed.path, Rules(keep_newest=False)

    def goes(now: float) -> bool:
        return path in [item.path for item in plan(project.store, rules, now)]

    assert mark(project.store, path, "4711")
    assert not goes(time.time())
    unmark(path, "4711")
    assert goes(time.time())
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: project.store.root.stat().st_uid + 61001)
        assert not goes(later())
    assert goes(later())


def test_wheels_go_on_request_and_only_those_that_no_lock_names(
    project: Project, tmp_path: Path
) -> None:
    project.build()
    (tmp_path / "more").mkdir()
    stray = make_wheel(tmp_path / "more", "stray")
    shutil.copy2(stray, project.store.wheels)
    (project.store.wheels / "README.txt").write_text("mine")
    there = {path.name for path in project.store.wheels.iterdir()}
    assert sweep(project.store).removed == []
    assert plan(project.store, Rules(wheels=True), time.time()) == []
    done = sweep(project.store, wheels=True)
    assert names(done.removed) == {("wheel", stray.name)}
    assert {path.name for path in project.store.wheels.iterdir()} == there - {stray.name}
    for path in project.store.layers.iterdir():
        path.unlink()
    assert project.build(offline=True).made.reused == 0


def test_a_lock_that_nothing_was_built_from_counts_if_it_is_named(
    project: Project, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path, "planned")
    shutil.copy2(wheel, project.store.wheels)
    shutil.rmtree(project.store.programs)  # no bundle is here that needs them
    locked = other_project(project).locked(wheel)
    assert names(plan(project.store, Rules(wheels=True), later())) == {("wheel", wheel.name)}
    rules = Rules(wheels=True, projects=(locked.root,))
    assert plan(project.store, rules, later()) == []


def test_a_lock_that_cannot_be_read_removes_nothing(project: Project) -> None:
    project.build()
    lock = project.root / "pylock.toml"
    lock.unlink()
    lock.mkdir()
    fetched(project.store.hub, "models--org--mine", **{OLD: "data"})  # which it may name
    before = digests(project.store.root)
    with pytest.raises(StagerError, match=r"pylock\.toml"):
        apply(project.store, Rules(wheels=True), later())
    assert digests(project.store.root) == before
    assert {item.kind for item in plan(project.store, Rules(), later())} <= {"layer"}


OLD, NEW = "a" * 40, "b" * 40


def fetched(hub: Path, name: str, **commits: str) -> Path:
    """A repository as ``huggingface_hub`` keeps it: files (of 1000 bytes each) by commit."""
    repository = hub / name
    (repository / "blobs").mkdir(parents=True)
    (hub / ".locks" / name).mkdir(parents=True)
    for commit, blobs in commits.items():
        snapshot = repository / "snapshots" / commit
        (snapshot / "sub").mkdir(parents=True)
        for blob in blobs.split():
            (repository / "blobs" / blob).write_bytes(b"w" * 1000)
            (snapshot / "sub" / f"{blob}.json").symlink_to(f"../../../blobs/{blob}")
    return repository


def test_files_of_a_hub_stay_as_long_as_a_lock_names_their_commit(project: Project) -> None:
    project.build()
    hub = project.store.hub
    fetched(hub, "models--org--half", **{OLD: "shared only", NEW: "shared new"})
    gone = fetched(hub, "datasets--org--gone", **{OLD: "data"})
    (hub / "own-0123").write_text("x")
    (hub / "notes.md").write_text("mine")
    lock = project.root / "pylock.toml"
    lock.write_text(f'{lock.read_text()}\n[tool.other]\ncommit = "{NEW}"\n')
    assert plan(project.store, Rules(), time.time()) == []
    done = sweep(project.store, keep_newest=True)
    assert {(item.path, item.why) for item in done.removed} == {
        (gone, "no lock names it"),
        (hub / "own-0123", "a build left it"),
    }
    assert sum(item.bytes for item in done.removed) >= 1001
    assert {item.kind for item in done.removed} == {"hub"}
    assert {path.name for path in hub.iterdir()} == {".locks", "models--org--half", "notes.md"}
    assert {path.name for path in (hub / ".locks").iterdir()} == {"models--org--half"}


def test_a_users_own_cache_is_nothing_to_clean(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.build()
    monkeypatch.setenv("HF_HUB_CACHE", str(project.store.hub))
    mine = fetched(project.store.hub, "models--org--mine", **{OLD: "data"})
    assert sweep(project.store).removed == []
    monkeypatch.delenv("HF_HUB_CACHE")
    moved = project.store.root.rename(tmp_path / "moved")
    outside = (moved / "hub").rename(tmp_path / "outside")
    moved.rename(project.store.root)
    (project.store.root / "hub").symlink_to(outside)
    assert sweep(project.store).removed == []
    assert (outside / mine.name).is_dir()


def test_partial_files_go_unless_a_build_is_under_way(project: Project) -> None:
    project.build()
    with project.store.lock():
        (left_behind(project.store, "new") / "half").write_bytes(b"h" * 1000)
        assert plan(project.store, Rules(), later()) == []
    done = sweep(project.store)
    assert [(item.kind, item.bytes) for item in done.removed] == [("partial", 1000)]
    assert left_in_tmp(project.store) == []
    final = project.store.projects / "x"
    with project.store.publish(final) as partial:
        partial.write_text("x")
        assert apply(project.store, Rules(), later()).removed == []


def test_it_waits_for_a_build_and_decides_then(project: Project) -> None:
    """The build under way makes a bundle the newest that was nobody's when the clean began."""
    old, new = rebuilt(project)
    (note,) = project.store.projects.iterdir()
    held, told = threading.Event(), threading.Event()

    def build() -> None:
        with project.store.lock():
            held.set()
            assert told.wait(300)
            note.write_text(note.read_text().replace(new.name, old.name))

    building = threading.Thread(target=build)
    building.start()
    assert held.wait(300)
    assert ("bundle", old.name) in names(plan(project.store, Rules(), later()))
    done = apply(project.store, Rules(), later(), told.set)
    building.join()
    assert told.is_set()
    assert (old.exists(), new.exists()) == (True, False)
    assert ("bundle", new.name) in names(done.removed)


def test_a_note_that_makes_no_sense_goes(project: Project) -> None:
    made = project.build().packed.path
    for number, note in enumerate(["", "{", "[]", "{}", '"text"', '{"project": 3, "bundle": "b"}']):
        (project.store.projects / f"{number}.json").write_text(note)
    assert names(sweep(project.store).removed) == {("note", f"{n}.json") for n in range(6)}
    assert made.exists()


def test_links_and_foreign_files_stay(project: Project, tmp_path: Path) -> None:
    project.build()
    outside = tmp_path / "precious.pkgs.tar"
    outside.write_bytes(b"p")
    store = project.store
    for place in (store.bundles, store.layers, store.programs, store.seals, store.projects):
        for ending in (".pkgs.tar", ".tar.zst", ".pyz", ".pkgs.tar.txt", ".json"):
            (place / f"link{ending}").symlink_to(outside)
        (place / "notes.md").write_text("mine")
    assert sweep(store, wheels=True).removed == []
    assert outside.read_bytes() == b"p"


def test_a_damaged_bundle_of_a_project_stays_and_needs_nothing(project: Project) -> None:
    made = project.build().packed.path
    made.write_bytes(b"damaged")
    removed = {item.kind for item in sweep(project.store).removed}
    assert removed == {"layer", "program"}
    assert made.exists()


def test_nodes_keep_each_projects_newest(project: Project) -> None:
    own = project.build().packed.manifest.id
    other = other_project(project)
    others = other.build().packed.manifest.id
    store, used = project.store, Digest.of(b"a bundle from elsewhere")
    assert set(list_kept_environments(store, own, everything=False)) == {own, others}
    assert set(list_kept_environments(store, used, everything=False)) == {used, own, others}
    assert list_kept_environments(store, own, everything=True) == []
    shutil.rmtree(other.root)
    assert list_kept_environments(store, own, everything=False) == [own]
    (store.root / "projects" / "made-by-hand.json").write_text("{")
    assert list_kept_environments(store, own, everything=False) == [own]
