"""A project that was imported: its code is written out, edited, and built without an index."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundle.format.layer import Entry, Index, Link
from bundle.format.manifest import BLOCK
from stager.building.build import BuildOptions, Built, build
from stager.building.current_bundle import newest_bundle, offline_root
from stager.carrying.exports import ExportOptions, export, export_project
from stager.carrying.imports import ImportResult, import_bundle, refuse_clashes
from stager.config.load import load
from stager.config.template import make_default_config
from stager.core.errors import BundleError, ConfigError, StagerError, WheelError
from stager.core.store import Store
from stager.core.values import Target
from stager.pack.bundle import bundle_path
from stager.pack.bundle_file import ChosenBundle, read_manifest
from tests.support.building import Project, Recorder, digests


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A project outside, and the folders of the other side, where there is no wheel."""

    project: Project
    wheelhouse: Path
    inside: Store
    lab: Path
    patch: pytest.MonkeyPatch

    def carry(self) -> ImportResult:
        """Build the project unless it is, export its bundle, leave all else behind, import it."""
        file = self.export()
        self.patch.setenv("OFFLINE_ROOT", str(self.inside.root))
        self.project.root.rename(self.project.root.with_name("outside"))
        self.wheelhouse.rename(self.wheelhouse.with_name("wheelhouse-outside"))
        return self.take(file)

    def export(self) -> Path:
        self.project.build()
        file = self.lab.with_name("lab.carry.tar")
        config = load(self.project.root)
        return export_project(config, ExportOptions(output=file), Recorder()).file

    def take(self, file: Path) -> ImportResult:
        """Import it, with the project's code."""
        return import_bundle(
            make_default_config(self.lab.parent), file, Recorder(), project=self.lab
        )

    def build(self, recorder: Recorder | None = None, *, offline: bool = False) -> Built:
        """Build inside, as `stager build` does."""
        options = BuildOptions(prove=False, offline=offline)
        return build(load(self.lab), options, recorder or Recorder())


@pytest.fixture
def gap(project: Project, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gap:
    """Both sides."""
    return Gap(
        project=project,
        wheelhouse=wheelhouse,
        inside=Store(tmp_path / "inside"),
        lab=tmp_path / "lab",
        patch=monkeypatch,
    )


def test_what_is_written_out_is_built_into_the_same_bundle(gap: Gap) -> None:
    """With assets and links, and what `environment.prune` leaves out; then with an edit."""
    root = gap.project.root
    (root / "data").mkdir()
    (root / "data" / "news.csv").write_text("a,b\n")
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / "again.py").symlink_to("train.py")
    gap.project.settings(
        "alpha",
        "schemes",
        more='prune = ["headers"]\n[assets]\npaths = ["data/news.csv"]\n[project]\nname = "lab"',
    )
    outside = gap.project.build()
    before = digests(root)
    imported = gap.carry()
    assert (imported.project, imported.notes) == (gap.lab, ())
    assert digests(gap.lab) == before  # the lock is where it was
    assert (gap.lab / "tool.sh").stat().st_mode & 0o777 == 0o755
    assert (gap.lab / "again.py").readlink() == Path("train.py")
    recorder = Recorder()
    again = gap.build(recorder)
    assert again.packed.manifest == outside.packed.manifest
    assert not list(gap.inside.wheels.glob("alpha*"))
    assert any("3 packages taken from bundles" in note for note in recorder.notes)
    (gap.lab / "train.py").write_text("print('edited')\n")
    edited = gap.build(offline=True)
    kinds = {layer.id: layer.kind for layer in edited.packed.manifest.layers}
    new = kinds.keys() - {layer.id for layer in outside.packed.manifest.layers}
    assert [kinds[key] for key in new] == ["project"]
    imported.bundle.unlink()  # it may go: the offline root has its layers by now
    assert gap.build().packed.manifest == edited.packed.manifest


@pytest.mark.full
def test_a_package_that_was_built_from_source(gap: Gap, sdist: Path) -> None:
    outside = gap.project.settings("from-source", more='[project]\nname = "lab"').build()
    gap.carry()
    assert gap.build().packed.manifest == outside.packed.manifest


def test_nothing_is_taken_from_a_damaged_bundle(gap: Gap) -> None:
    imported = gap.carry()
    data = bytearray(imported.bundle.read_bytes())
    manifest = read_manifest(imported.bundle)
    alpha = next(layer for layer in manifest.layers if layer.name == "alpha")
    data[data.index(alpha.member.encode()) + BLOCK] ^= 1
    imported.bundle.write_bytes(data)
    recorder = Recorder()
    with pytest.raises(WheelError) as caught:
        gap.build(recorder, offline=True)
    assert caught.value.context == ("alpha-1.0-py3-none-any.whl: not in the offline root",)
    assert "`stager export --base ID`" in caught.value.hint
    [note] = recorder.notes
    assert note.startswith(f"nothing is taken from {imported.bundle.name}: alpha 1.0 does not have")
    assert not gap.inside.layer(alpha.id).exists()


def test_a_bundle_that_is_not_trusted_gives_nothing(gap: Gap, tmp_path: Path) -> None:
    gap.carry()
    (tmp_path / "signers").write_text("")
    trust = f'\n[trust]\nallowed-signers = "{tmp_path / "signers"}"\nrequire = true\n'
    with (gap.lab / "stager.toml").open("a") as settings:
        settings.write(trust)
    with pytest.raises(StagerError):
        gap.build(offline=True)
    assert list(gap.inside.layers.iterdir()) == []


def test_a_link_or_a_folder_that_is_used_is_refused_before_anything_is_imported(gap: Gap) -> None:
    file = gap.export()
    gap.patch.setenv("OFFLINE_ROOT", str(gap.inside.root))
    real = gap.lab.with_name("real")
    real.mkdir()
    for target in (real, gap.lab.with_name("nowhere")):
        gap.lab.unlink(missing_ok=True)
        gap.lab.symlink_to(target)
        with pytest.raises(ConfigError, match="it is a symbolic link"):
            gap.take(file)
        assert gap.lab.is_symlink()
    gap.lab.unlink()
    gap.lab.mkdir()
    (gap.lab / "mine").write_text("")
    with pytest.raises(ConfigError, match="there are files in it already"):
        gap.take(file)
    assert [path.name for path in gap.lab.iterdir()] == ["mine"]
    assert not gap.inside.root.exists()


def test_the_lock_of_another_platform(gap: Gap) -> None:
    file = gap.export()
    here = Target.from_host().platform
    other = here.replace("_2_", "_2_1", 1)
    gap.patch.setattr("stager.core.values._host_platform", lambda: other)
    [note] = gap.take(file).notes
    assert note.startswith(f"the packages are for {here}, this machine is {other}: to build here")
    assert f'environment.platform = "{here}"' in note


def test_another_offline_root_is_said(gap: Gap) -> None:
    gap.project.settings("alpha", more='offline-root = "~/mine"')
    file = gap.export()
    gap.patch.delenv("OFFLINE_ROOT")
    imported = gap.take(file)
    [note] = imported.notes
    assert f"{Path.home() / 'mine'}, which does not have the packages" in note
    assert f"set OFFLINE_ROOT={imported.bundle.parents[1]}" in note


def _digests(lock: Path) -> list[str]:
    return re.findall(r"[0-9a-f]{64}", lock.read_text())


def _index(files: dict[str, str], links: dict[str, str]) -> Index:
    """The index of a layer with these files, by their content, and links."""
    entries = [
        Entry(path, len(text), 0o644, hashlib.sha256(text.encode()).hexdigest(), 0)
        for path, text in files.items()
    ]
    return Index(tuple(entries), tuple(Link(*link) for link in links.items()), ())


def test_layers_that_do_not_fit_into_one_folder_are_refused() -> None:
    """Each alone is fine, and all are in an environment, where each has a place of its own."""
    asset = _index({"assets/data/x.csv": "a"}, {"assets/s/t/d": "../.."})
    project = _index({"project/train.py": "", "project/data/y.csv": "b"}, {"project/a": "data"})
    refuse_clashes([asset, project, _index({"project/data/x.csv": "a"}, {})])
    for other, why in (
        (_index({"project/data/x.csv": "other"}, {}), "would be data/x.csv in the project's"),
        (_index({}, {"project/data/x.csv": "y.csv"}), "would be data/x.csv in the project's"),
        (_index({"project/s/t/d": ""}, {}), "would be s/t/d in the project's"),
        (_index({}, {"project/pylock.toml": "s/t/d/../.bashrc"}), "links lead out of its folder"),
    ):
        for layers in ([asset, project, other], [other, asset, project]):
            with pytest.raises(StagerError, match=why):
                refuse_clashes(layers)


def test_a_link_in_the_locks_place_is_not_followed(gap: Gap) -> None:
    """A bundle may hold one: settings outside of `project.path` leave that name to the project."""
    root, target = gap.project.root / "src", "data.txt"
    root.mkdir()
    (root / target).write_text("the project's own")
    (root / "pylock.toml").symlink_to(target)
    gap.project.settings("alpha", more='[project]\npath = "src"')
    [note] = gap.carry().notes
    assert note.startswith(f"there is no stager.toml in {gap.lab}")
    assert {path.name for path in gap.lab.iterdir()} == {target, "pylock.toml"}
    assert (gap.lab / target).read_text() == "the project's own"
    assert not (gap.lab / "pylock.toml").is_symlink()


def test_builds_take_packages_only_out_of_bundles_that_somebody_vouches_for(gap: Gap) -> None:
    """A bundle only claims that a layer was made from a wheel."""
    file = gap.export()
    gap.carry()
    (note,) = (gap.inside.root / "imports").glob("*.for-builds")
    note.unlink()
    with pytest.raises(WheelError) as caught:
        gap.build(offline=True)
    assert "--for-builds" in caught.value.hint
    import_bundle(make_default_config(gap.lab.parent), file, Recorder(), for_builds=True)
    gap.build()


def test_a_lock_of_another_bundle_is_refused(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id does not cover it: whoever carries the file could put another one in."""
    gap.project.build()
    lock = gap.project.root / "pylock.toml"
    bundle = read_manifest(newest_bundle(load(gap.project.root)).path)
    other = lock.read_text().replace(next(iter(_digests(lock))), "0" * 64)
    lock.write_text(other)
    file = gap.lab.with_name("forged.carry.tar")
    store = Store(offline_root(load(gap.project.root)))
    chosen = ChosenBundle(path=bundle_path(store, bundle), id=bundle.id)
    export(chosen, file, store, lock=lock.read_bytes())
    before = digests(store.bundles)
    with pytest.raises(BundleError, match="is not the one that its bundle was made from"):
        import_bundle(load(gap.project.root), file, Recorder())
    assert digests(store.bundles) == before, "what was here stays"
    monkeypatch.setenv("OFFLINE_ROOT", str(gap.inside.root))
    with pytest.raises(BundleError, match="is not the one that its bundle was made from"):
        import_bundle(make_default_config(gap.lab.parent), file, Recorder())
    assert list(gap.inside.bundles.iterdir()) == []
    assert list((gap.inside.root / "seals").glob("*")) == []
