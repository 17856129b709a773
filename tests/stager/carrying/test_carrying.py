"""Carrying a bundle: what comes out is what went in, or it is refused."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.code_store import StoredCode, add_code, list_stored_code
from bundle.driver.plan import digest_of_all
from bundle.format.archive import BundleFile
from bundle.format.manifest import BLOCK, FORMAT, MANIFEST_NAME, member_header
from bundle.protocol.digest import Digest
from stager.building.build import Built
from stager.carrying import exports
from stager.carrying.exports import (
    CarriedPart,
    ExportOptions,
    ExportResult,
    Label,
    export,
    export_project,
    read_label,
)
from stager.carrying.imports import import_bundle, import_compiled_code, read_compiled_code
from stager.cleanup import Rules, plan
from stager.config.load import load
from stager.core.errors import BundleError
from stager.core.files import BUNDLE_SUFFIX
from stager.core.store import Store
from stager.pack.bundle_file import LABEL_NAME, ChosenBundle, open_bundle
from tests.support.building import Project, Recorder, digests
from tests.support.bundles import Raw, forge, make_bundle, rot
from tests.support.object_files import ELF
from tests.support.wheelhouse import make_wheel

PLACES = 80


class Sides:
    """A project on one side of the gap, an offline root on the other."""

    def __init__(self, project: Project, inside: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project, self.inside = project, inside
        self._monkeypatch = monkeypatch

    def export(self, **options: object) -> ExportResult:
        """Build and export; the file lies beside the project."""
        output = self.project.root.parent / "carried.carry.tar"
        chosen = ExportOptions(**{"output": output, **options})  # type: ignore[arg-type]
        return export_project(load(self.project.root), chosen, Recorder())

    def take(self, file: Path, asked: str = "") -> Path:
        """Import on the other side; return the bundle."""
        with self._monkeypatch.context() as patch:
            patch.setenv("OFFLINE_ROOT", str(self.inside.root))
            config = load(self.project.root)
            return import_bundle(config, file, Recorder(), asked=asked).bundle

    def take_code(self, file: Path) -> None:
        """Import compiled code on the other side."""
        code = read_compiled_code(file)
        with self._monkeypatch.context() as patch:
            patch.setenv("OFFLINE_ROOT", str(self.inside.root))
            import_compiled_code(load(self.project.root), code)

    def refuse(self, data: bytes, match: str = "") -> BundleError:
        """See that a carried file with these bytes is refused, and leaves nothing behind."""
        copy = self.project.root.parent / "copy.carry.tar"
        copy.write_bytes(data)
        with pytest.raises(BundleError, match=match) as caught:
            self.take(copy)
        assert list(self.inside.bundles.iterdir()) == []
        return caught.value


@pytest.fixture
def sides(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sides:
    """The two sides."""
    return Sides(project, Store(tmp_path / "inside"), monkeypatch)


@pytest.fixture
def built(sides: Sides) -> Built:
    """The project's first bundle, which is also on the other side."""
    built = sides.project.build()
    sides.take(sides.export().file)
    return built


@pytest.fixture
def whole(sides: Sides) -> bytes:
    """The file that carries the project's first bundle, which the other side has not."""
    sides.project.build()
    return sides.export().file.read_bytes()


def same(one: Path, other: Path) -> bool:
    """Whether two files, or bundles, have the same bytes."""
    if not one.name.endswith(BUNDLE_SUFFIX):
        return one.read_bytes() == other.read_bytes()
    with BundleFile(str(one)) as bundle, BundleFile(str(other)) as another:
        return digest_of_all(bundle) == digest_of_all(another)


def test_a_bundle_comes_out_as_it_went_in(sides: Sides) -> None:
    built = sides.project.build()
    done = sides.export()
    assert done.file.stat().st_size == done.bytes
    assert done.sha256 == Digest.of(done.file.read_bytes())
    bundle = sides.take(done.file)
    assert bundle.is_relative_to(sides.inside.root)
    assert same(bundle, built.packed.path)
    [lock] = bundle.parent.glob("*.pylock.toml")
    assert same(lock, built.lock.path)
    before = digests(sides.inside.root)
    sides.take(sides.export().file)
    assert digests(sides.inside.root) == before, "again is nothing new"


def test_only_what_is_new_is_carried(sides: Sides, built: Built, wheelhouse: Path) -> None:
    """The second file is little larger than the layer of the package that changed."""
    noise = random.Random(5).randbytes(400_000)
    make_wheel(wheelhouse, "alpha", "9.0", files={"alpha/__init__.py": "", "alpha/data": noise})
    again = sides.project.build(upgrade=True)
    done = sides.export(base=built.packed.manifest.id[:12])
    layer = next(layer for layer in again.packed.manifest.layers if layer.name == "alpha")
    assert done.layers == 1
    assert done.bytes <= 1.1 * layer.size
    assert same(sides.take(done.file), again.packed.path)


def test_since_a_date(sides: Sides, built: Built) -> None:
    now = datetime.datetime.now().astimezone()
    done = sides.export(since=now + datetime.timedelta(minutes=1))
    assert (done.base, done.layers) == (built.packed.manifest.id, 0)
    with pytest.raises(BundleError, match="no bundle of project was exported before") as caught:
        sides.export(since=now - datetime.timedelta(days=1))
    assert caught.value.context[0].startswith("exported at ")


def test_a_base_that_is_not_known_here_or_on_the_other_side(sides: Sides, built: Built) -> None:
    with pytest.raises(BundleError, match="0123456789ab that --base names is not known"):
        sides.export(base="0123456789ab")
    done = sides.export(base=built.packed.manifest.id)
    sides.inside = Store(sides.inside.root.with_name("elsewhere"))
    key = built.packed.manifest.id[:12]
    with pytest.raises(BundleError, match=rf"since the bundle {key}, and \d+ parts") as caught:
        sides.take(done.file)
    assert caught.value.hint.startswith("import the file that carries that first")
    assert list(sides.inside.bundles.iterdir()) == []


def test_a_base_that_is_damaged_on_the_other_side(sides: Sides, built: Built) -> None:
    [base] = sides.inside.bundles.glob("*.pkgs.tar")
    data = bytearray(base.read_bytes())
    data[-3 * BLOCK] ^= 1  # in the last layer
    base.write_bytes(data)
    sides.project.settings("alpha", "cli-tool").build()
    done = sides.export(base=built.packed.manifest.id)
    with pytest.raises(BundleError, match="which the carried file builds on, is damaged"):
        sides.take(done.file)


def test_damage_at_any_place_is_refused(sides: Sides, whole: bytes) -> None:
    chance = random.Random(17)
    for place in (0, BLOCK, len(whole) - 1, *chance.sample(range(len(whole)), PLACES)):
        data = bytearray(whole)
        data[place] ^= 1 << chance.randrange(8)
        sides.refuse(bytes(data))
    signed = member_header(LABEL_NAME, -1) + whole[BLOCK:]
    sides.refuse(signed, "no file that `stager export` has written")


def test_a_copy_that_was_interrupted_is_refused(sides: Sides, whole: bytes) -> None:
    chance = random.Random(18)
    for length in (0, 1, BLOCK, len(whole) - 1, *chance.sample(range(len(whole)), 30)):
        sides.refuse(whole[:length])
    sides.refuse(whole[: len(whole) // 2], r"ends too early: it has .* of")


def test_what_is_damaged_here_does_not_get_across(sides: Sides) -> None:
    rot(sides.project.store.layer(sides.project.build().made.layers[0].id))
    with pytest.raises(BundleError, match="is damaged"):
        sides.export()
    assert not (sides.project.root.parent / "carried.carry.tar").exists()


def test_a_bundle_is_not_taken_for_a_carried_file(sides: Sides, tmp_path: Path) -> None:
    bundle = sides.project.build().packed.path
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (bundle, "is a bundle, which needs no import"),
        (tmp_path / "absent", "cannot be read: No such file"),
        (tmp_path / "pipe", "is not a regular file"),
    ):
        with pytest.raises(BundleError, match=why):
            sides.take(path)
    for data in (b"", b"something else\n"):
        sides.refuse(data, "no file that `stager export` has written")
    with pytest.raises(BundleError, match="does not carry the bundle that was asked for"):
        sides.take(sides.export().file, asked="0123456789ab")


def relabelled(data: bytes, change: Callable[[Label], Label]) -> bytes:
    """A carried file whose label says something else, with a digest that fits."""
    size = int(data[124:135], 8)
    label = change(read_label(Path("x"), data[BLOCK : BLOCK + size]))
    raw = label.to_bytes()
    start = BLOCK + size + -size % BLOCK
    return member_header(LABEL_NAME, len(raw)) + raw + bytes(-len(raw) % BLOCK) + data[start:]


def test_a_label_that_lies(sides: Sides, whole: bytes) -> None:
    part = CarriedPart(name="more", sha256=Digest.of(b""), size=0)
    for change in (
        lambda label: replace(label, id=Digest.of(b"other")),
        lambda label: replace(label, parts=()),
        lambda label: replace(label, parts=label.parts[::-1]),
        lambda label: replace(label, parts=label.parts[:1]),
        lambda label: replace(label, parts=(*label.parts, part)),
        lambda label: replace(label, parts=(*label.parts, replace(part, name="x" * 101))),
        lambda label: replace(label, left_out=("node.pyz",)),
        lambda label: replace(label, left_out=("../../etc/passwd",)),
        lambda label: replace(label, left_out=(MANIFEST_NAME,)),
    ):
        sides.refuse(relabelled(whole, change))
    other = relabelled(whole, lambda label: replace(label, format=99))
    refused = sides.refuse(other, "its format is 99, this one reads 1")
    assert "`stager export --with-tool` carries it" in refused.hint


def resized(whole: bytes, place: int, size: int) -> bytes:
    """A carried file whose label gives another size of a part."""

    def change(label: Label) -> Label:
        parts = list(label.parts)
        parts[place] = replace(parts[place], size=size)
        return replace(label, parts=tuple(parts))

    return relabelled(whole, change)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [-1, 1 << 33, 1 << 52])
@pytest.mark.parametrize("place", [0, 1])
def test_sizes_that_no_part_has(sides: Sides, whole: bytes, size: int, place: int) -> None:
    """Also where the file is long enough: a sparse one takes no room."""
    forged = resized(whole, place, size)
    if size == 1 << 33 and place == 0:
        start = forged.index(b"manifest.json\0")
        forged = forged[:start] + member_header(MANIFEST_NAME, size)
    copy = sides.project.root.parent / "copy.carry.tar"
    copy.write_bytes(forged)
    os.truncate(copy, 1 << 34)
    with little_memory(), pytest.raises(BundleError, match="names impossible sizes"):
        sides.take(copy)


def test_parts_that_the_file_is_too_short_for_are_not_read(sides: Sides, whole: bytes) -> None:
    forged = resized(whole, 0, 256 << 20)
    start = forged.index(b"manifest.json\0")
    header = member_header(MANIFEST_NAME, 256 << 20)
    with little_memory():
        sides.refuse(forged[:start] + header + forged[start + BLOCK :], "ends too early: it has")


def test_a_bundle_of_another_version(sides: Sides, whole: bytes) -> None:
    """The file itself is of this one: nothing is wrong with the copy."""
    ours = f'"format":{FORMAT},'.encode()
    assert whole.count(ours) == 1
    other = whole.replace(ours, ours.replace(str(FORMAT).encode(), b"9"))
    refused = sides.refuse(other, "has format 9; this program reads format")
    assert refused.hint.startswith("use the same version on both sides")


def test_parts_that_have_changed_places(sides: Sides, whole: bytes) -> None:
    """A medium that mixes its blocks up: every byte is there."""
    first, second = len(whole) // 3, 2 * len(whole) // 3
    one, other = (whole[at : at + BLOCK] for at in (first, second))
    data = bytearray(whole)
    data[first : first + BLOCK], data[second : second + BLOCK] = other, one
    refused = sides.refuse(bytes(data), "does not have the digest that it must have")
    assert "compare `sha256sum` on both sides" in refused.hint


def test_a_carried_file_is_not_taken_for_a_bundle(sides: Sides, built: Built) -> None:
    carried = sides.export().file
    with pytest.raises(BundleError, match="`stager export` wrote") as caught:
        open_bundle(carried).__enter__()
    assert caught.value.hint.endswith(f"stager import {carried}")


def test_the_last_import_of_a_project_stays(sides: Sides, built: Built) -> None:
    """`clean` removes what it replaces, with its lock."""
    later = 10 * 86400 + datetime.datetime.now().timestamp()
    assert [item.kind for item in plan(sides.inside, Rules(), later)] == []
    (sides.project.root / "more.py").write_text("x = 1\n")
    sides.project.build()
    newest = sides.take(sides.export().file)
    unused = plan(sides.inside, Rules(), later)
    assert {item.kind for item in unused} == {"bundle", "seal", "lock"}
    assert newest not in {item.path for item in unused}


@pytest.mark.parametrize("name", ["data.bin", "small.py"])
def test_an_index_that_does_not_tell_the_truth_is_refused(
    sides: Sides, tmp_path: Path, name: str
) -> None:
    """What was imported counts as made here: nobody compares its files with the index again."""
    data = b"0123456789abcdef" * (40 << 16)  # in several frames
    wheel = make_wheel(tmp_path, "large", files={"large/data.bin": data, "large/small.py": "A = 1"})
    store = sides.project.store
    real = make_bundle(store, [wheel], decompressor=None)

    def lie(raw: Raw) -> None:
        entry: list[object] = next(item for item in raw["files"] if item[0].endswith(name))
        entry[3] = Digest.of(b"something else")

    forged = forge(real.path, tmp_path / "forged.tar", index=lie)
    carried = export(ChosenBundle(path=forged), tmp_path / "f.tar", store, lock=b"").file
    sides.refuse(carried.read_bytes(), f"{name} does not have the digest in the")


def test_compiled_code_comes_along_if_both_sides_ask(
    sides: Sides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "compute_software_digest", lambda manifest: Digest.of(b"torch"))
    sides.project.build()
    with pytest.raises(BundleError, match="has no compiled code"):
        sides.export(with_code=True)
    code = StoredCode("0" * 64, "x86_64", Digest.of(b"torch"), "7", "b" * 64, "c" * 64)
    (tmp_path / "made" / "inductor").mkdir(parents=True)
    (tmp_path / "made" / "inductor" / "kernel.so").write_bytes(ELF)
    store = sides.project.store.compiled_code
    kept = add_code(str(store), str(tmp_path / "made"), code, 1 << 20)
    other = replace(code, software="d" * 64, kind="1" * 64)
    add_code(str(store), str(tmp_path / "made"), other, 1 << 20)
    file = sides.export(with_code=True).file
    sides.take(file)
    assert list_stored_code(str(sides.inside.compiled_code)) == []
    sides.take_code(file)
    [there] = list_stored_code(str(sides.inside.compiled_code))
    assert replace(there, path=kept.path) == kept
    assert same(Path(there.path), Path(kept.path))
    with pytest.raises(BundleError, match="carries no compiled code"):
        sides.take_code(sides.export().file)
