"""The bundle file: what is in it, what is refused, and that nothing damaged gets in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from bundle.driver.plan import digest_of_all
from bundle.format.archive import BundleFile
from bundle.format.layer import HEAD_PREFIX, head_summary
from bundle.protocol.problem import NodeError, ProblemCode
from stager.core.errors import BundleError, ResolveError, SpaceError, WheelError
from stager.core.store import Store, digest_file
from stager.core.values import Digest, Target, Wheel
from stager.layers.layer_build import make_layers
from stager.layers.source import LayerSource
from stager.pack.bundle import (
    FILE_NAME,
    Contents,
    list_file_needs,
    make_requires,
    pack,
    read_stored_head,
    short_name,
)
from stager.pack.decompressor import decompressor_lock
from stager.pack.members import copy_to
from stager.pack.node_program import make_node_program
from tests.support.building import HOST, frames_of, left_in_tmp, listing, source_of, wheel_of
from tests.support.bundles import rot
from tests.support.shared_objects import AARCH64, glibc
from tests.support.wheelhouse import make_wheel, standard_set


def fitting_set(folder):
    """The standard wheels without the versions of one that stand in each other's way."""
    return [wheel for wheel in standard_set(folder) if "beta-1" not in wheel.name]


def contents_of(wheels, store, decompressor=None):
    """Make the layers of wheels; what a bundle of them is made from."""
    made = make_layers([source_of(wheel) for wheel in wheels], store=store, target=HOST, jobs=2)
    return Contents(
        name="demo",
        target=HOST,
        wheels=tuple(map(wheel_of, wheels)),
        layers=made.layers,
        decompressor=wheel_of(decompressor) if decompressor else None,
        packages=("alpha",),
        imports=("alpha",),
    )


def packed(wheels, store, decompressor=None):
    with store.lock():
        return pack(contents_of(wheels, store, decompressor), store)


def test_the_bundle_is_a_tar_of_the_stores_layers_in_the_promised_order(
    tmp_path, store, zstandard_wheel
):
    made = packed(fitting_set(tmp_path / "wheels"), store, zstandard_wheel)
    layers = made.manifest.layers
    assert made.path.name == f"demo-{made.manifest.id[:12]}.pkgs.tar"
    assert made.path.stat().st_size == made.manifest.thin_size
    assert not made.reused
    first, heads = ["manifest.json", "node.pyz"], [layer.head_member for layer in layers]
    assert [line.rsplit(None, 1)[1] for line in listing(made.path)] == [*first, *heads]
    whole = copy_to(made.path, tmp_path / "whole")
    assert whole.stat().st_size == made.manifest.size
    lines = listing(whole)
    assert all(line.startswith("-rw-r--r-- 0/0 ") and "1970-01-01" in line for line in lines)
    names = [line.rsplit(None, 1)[1] for line in lines]
    assert names[2].startswith("zstandard-")
    frames = [f"layers/{layer.id}.tar.zst" for layer in layers]
    assert names[:2] + names[3:] == [*first, *(f"heads/{layer.id}" for layer in layers), *frames]

    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["tar", "-xf", whole, "-C", out], check=True)
    for layer in layers:
        head, frames = ((out / name).read_bytes() for name, _ in layer.members)
        assert head + frames == store.layer(layer.id).read_bytes()
    raw = json.loads((out / "manifest.json").read_bytes())
    assert raw["id"] == made.manifest.id
    assert [layer["name"] for layer in raw["layers"]] == [layer.name for layer in layers]


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "seal gone", "seal garbled", "gone"])
def test_a_bundle_that_was_touched_is_written_again(damage, tmp_path, store):
    wheels = [make_wheel(tmp_path, "alpha")]
    path = packed(wheels, store).path
    good = path.read_bytes()
    (seal,) = store.seals.iterdir()
    {
        "flip": lambda: path.write_bytes(good[:-2000] + bytes([good[-2000] ^ 1]) + good[-1999:]),
        "cut": lambda: os.truncate(path, len(good) - 1),
        "longer": lambda: path.write_bytes(good + b"x"),
        "gone": path.unlink,
        "seal gone": seal.unlink,
        "seal garbled": lambda: seal.write_bytes(b"\xff\xfe"),
    }[damage]()
    again = packed(wheels, store)
    assert not again.reused
    assert again.path.read_bytes() == good
    before = again.path.stat()
    assert packed(wheels, store).reused
    assert again.path.stat() == before, "a second time writes nothing"


def test_a_thin_bundle_reads_as_its_one_file(tmp_path, store):
    made = packed(fitting_set(tmp_path / "wheels"), store)
    data = copy_to(made.path, tmp_path / "whole").read_bytes()
    with BundleFile(str(made.path)) as thin, BundleFile(str(tmp_path / "whole")) as whole:
        assert (thin.is_thin, whole.is_thin) == (True, False)
        assert digest_of_all(thin) == digest_of_all(whole) == Digest.of(data)
        for start in range(0, len(data), 997):
            wanted = data[start : start + 1500]
            assert thin.read(start, len(wanted)) == wanted


def read_last_frame(path, layer, frame):
    with BundleFile(str(path)) as bundle:
        end = bundle.offset(layer.member) + layer.size - layer.head_size
        bundle.frame(end - frame.size, frame.size, frame.sha256)


@pytest.mark.parametrize("fault", ["gone", "cut", "flip"])
def test_a_thin_bundle_names_the_layer_that_cannot_be_used(fault, tmp_path, store):
    made = packed(fitting_set(tmp_path / "wheels"), store)
    layer = made.manifest.layers[1]
    path = store.layer(layer.id)
    frame = read_stored_head(store, layer)[1].frames[-1]
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        os.truncate(path, layer.size - 1)
    else:
        rot(path)
    with pytest.raises(NodeError) as caught:
        read_last_frame(made.path, layer, frame)
    problem = caught.value.problem
    assert (problem.code, problem.where) == (ProblemCode.STORED_LAYER_UNUSABLE, str(made.path))
    assert str(path) in problem.why
    if fault != "gone":
        path.unlink()
    assert not packed(fitting_set(tmp_path / "wheels"), store).reused
    with BundleFile(str(made.path)) as bundle:
        assert bundle.is_thin


def test_only_layers_that_no_bundle_was_checked_with_are_read(tmp_path, store, monkeypatch):
    wheels = fitting_set(tmp_path / "wheels")
    packed(wheels, store)
    read: list[str] = []
    monkeypatch.setattr(
        "stager.pack.bundle.check_frames", lambda store, layer, index: read.append(layer.name)
    )
    packed([*wheels, make_wheel(tmp_path, "one-more")], store)
    assert read == ["one-more"]


# --- packages that conflict ----------------------------------------------------------------------


def test_all_such_files_are_named(tmp_path, store):
    """Equal files are accepted."""
    files = [{f"m{n}.py": f"WHO = {who}\n" for n in range(3)} for who in (1, 2)]
    same = {"same.py": "X = 1\n"}
    wheels = [
        make_wheel(tmp_path, name, files={**content, **same})
        for name, content in zip(("one", "two"), files, strict=True)
    ]
    with pytest.raises(WheelError) as caught:
        packed(wheels, store)
    context = "\n".join(caught.value.context)
    assert [name in context for name in (*files[0], *same)] == [True, True, True, False]


def test_a_file_where_another_package_has_a_directory(tmp_path, store):
    wheels = [
        make_wheel(tmp_path, "one", files={"thing": "a file"}),
        make_wheel(tmp_path, "two", files={"thing/__init__.py": ""}),
    ]
    for order in (wheels, wheels[::-1]):
        with pytest.raises(WheelError) as caught:
            packed(order, store)
        (line,) = caught.value.context
        assert line.endswith("site-packages/thing: a file in one 1.0, a directory in two 1.0")


# --- a damaged store -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["head", "index", "frame", "all"])
def test_a_damaged_layer_makes_no_bundle(place, tmp_path, store):
    wheels = fitting_set(tmp_path / "wheels")
    with store.lock():
        contents = contents_of(wheels, store)
        layer = store.layer(contents.layers[0].id)
        data = bytearray(layer.read_bytes())
        size = head_summary(bytes(data[:HEAD_PREFIX])).head_size
        if place == "all":
            layer.unlink()
        else:
            at = {"head": HEAD_PREFIX - 1, "index": size // 2 + 20, "frame": size + 5}[place]
            data[at] ^= 4
            layer.write_bytes(data)
        with pytest.raises(BundleError, match=r"the stored layer of alpha 1\.0 is dam") as caught:
            pack(contents, store)
        assert str(layer) in caught.value.context
        assert not layer.exists()
    assert list(store.bundles.iterdir()) == []
    assert left_in_tmp(store) == []
    assert packed(wheels, store).path.exists(), "the next build does not mend it"
    assert frames_of(layer)


def test_room_is_asked_for_before_anything_is_written(tmp_path, store, monkeypatch):
    with store.lock():
        contents = contents_of([make_wheel(tmp_path, "alpha")], store)
        state = list(os.statvfs(store.root))
        state[4] = 0  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(state))
        with pytest.raises(SpaceError, match="the bundle: need"):
            pack(contents, store)
    assert list(store.bundles.iterdir()) == []


# --- the far side's program ----------------------------------------------------------------------


def test_the_node_program_is_the_far_side_byte_for_byte():
    program = make_node_program()
    assert program == make_node_program()
    repo = Path(__file__).resolve().parents[3]
    modules = {path.relative_to(repo).as_posix(): path for path in (repo / "bundle").rglob("*.py")}
    assert "bundle/node/node_root.py" in modules
    with zipfile.ZipFile(BytesIO(program)) as archive:
        assert archive.namelist() == sorted(["__main__.py", *modules])
        for name, path in modules.items():
            assert archive.read(name) == path.read_bytes()


# --- what a node must have -----------------------------------------------------------------------


def wheels_tagged(*tags):
    found = []
    for number, tag in enumerate(tags):
        path = Path(f"p{number}-1.0-{tag}.whl")
        name, version = parse_wheel_filename(path.name)[:2]
        found.append(Wheel(name=name, version=version, path=path, sha256=Digest.of(b""), size=0))
    return found


def test_a_node_needs_the_newest_c_library_of_any_wheel():
    for tags, version in (
        ([], "0.0"),
        (["py3-none-any"], "0.0"),
        (["cp311-cp311-manylinux1_x86_64"], "2.5"),
        (["cp311-cp311-manylinux2010_x86_64.manylinux_2_12_x86_64"], "2.12"),
        (["cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", "py3-none-any"], "2.17"),
        (["cp311-abi3-manylinux_2_24_x86_64", "cp311-cp311-manylinux_2_27_x86_64"], "2.27"),
        # One that runs on the older of its two tags needs no more than that.
        (["cp311-cp311-manylinux_2_17_x86_64.manylinux_2_28_x86_64"], "2.17"),
        (["cp311-cp311-linux_x86_64"], "2.28"),
    ):
        target = Target(python="3.11", platform="manylinux_2_28_x86_64")
        needs = make_requires(target, wheels_tagged(*tags))
        assert (needs.python, needs.machine, needs.libc) == ("3.11", "x86_64", "glibc")
        assert needs.libc_version == version


# --- What the shared libraries in wheels need of the C library, whatever their tags say


TARGET = Target(python="3.11", platform="manylinux_2_28_x86_64")
TAG = "cp311-cp311-manylinux2014_x86_64"


@dataclass
class House:
    """Wheels, and the offline root that their layers are made in."""

    folder: Path
    store: Store
    wheels: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name, tag=TAG, **libraries):
        """Add a wheel with these libraries, each in the package's folder."""
        files = {f"{name}/{stem}.so": data for stem, data in libraries.items()}
        files[f"{name}/a.py"] = "A = 1"
        self.wheels.append(make_wheel(self.folder, name, files=files, tag=tag))
        return self

    def needs(self, target=TARGET, prune=()):
        """Make the layers; return what they need."""
        wheels = [wheel_of(path) for path in self.wheels]
        sources = [LayerSource.from_wheel(one, prune) for one in wheels]
        self.notes.clear()
        with self.store.lock():
            made = make_layers(sources, store=self.store, target=target, jobs=1)
            found = list_file_needs(wheels, made.layers, self.store, target, self.notes.append)
        self.requires = make_requires(target, wheels, files=found)
        return found


@pytest.fixture
def house(tmp_path):
    return House(tmp_path, Store(tmp_path / "store"))


def test_the_file_that_needs_most_decides_where_the_tag_promises_more(house):
    house.add("one", low=glibc("2.5"), most=glibc("2.17", "2.27"), other=glibc("2.26"))
    house.add("two", any=glibc("2.4"))
    first, second = house.needs()
    assert str(first) == "one 1.0 (one/most.so)"
    assert (first.version, second.version) == ((2, 27), (2, 4))
    assert house.notes == [
        "one 1.0 (one/most.so) needs glibc 2.27, though its tag is manylinux2014_x86_64: nodes "
        "with an older one are refused"
    ]
    needs = house.requires
    assert (needs.libc_version, needs.libc_needed_by) == ("2.27", "one 1.0 (one/most.so)")


def test_more_than_the_nodes_have_is_refused_by_name(house):
    house.add("one", any=glibc("2.34")).add("two", any=glibc("2.17")).add("three", x=glibc("2.31"))
    with pytest.raises(WheelError, match="2 packages cannot be loaded on manylinux_2_28") as caught:
        house.needs()
    assert caught.value.context == (
        "one 1.0 needs glibc 2.34 (one/any.so)",
        "three 1.0 needs glibc 2.31 (three/x.so)",
    )
    assert 'environment.platform = "manylinux_2_34_x86_64"' in str(caught.value.hint)
    assert '["one:/one/any.so"]' in str(caught.value.hint)
    left_out = ["one:/one/any.so", "three:/three/x.so"]
    assert [need.package for need in house.needs(prune=left_out)] == ["two 1.0"]


def test_what_the_loader_does_not_ask_for_is_no_need(house):
    weak, foreign = glibc("2.34", weak=True), glibc("2.34", machine=AARCH64)
    house.add("one", weak=weak, arm=foreign, text=b"\x7fELF\x02\x01 and no more")
    assert house.needs() == ()
    assert house.requires.libc_version == "2.17"


def test_wheels_for_any_platform_are_not_read(house):
    house.add("one", "py3-none-any", any=glibc("2.34"))
    assert house.needs() == ()
    assert not (house.store.root / FILE_NAME).exists()


def test_a_layer_is_read_once(house):
    house.add("one", any=glibc("2.27"))
    before = house.needs()
    (layer,) = house.store.layers.iterdir()
    _damage(layer)
    assert house.needs() == before, "what was found is kept"
    (house.store.root / FILE_NAME).write_text('{"no": "record"}')
    with pytest.raises(BundleError, match=r"the stored layer of one 1\.0 is damaged"):
        house.needs()
    assert house.needs() == before, "it is made again, and read again"


def _damage(layer):
    """Overwrite the frames, and leave the length and the head."""
    data = layer.read_bytes()
    layer.write_bytes(data[:-40] + bytes(40))


# --- The pinned zstd decompressor: one true wheel for every target that Python has no zstd for


@pytest.mark.parametrize("python", ["3.9", "3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("libc", ["manylinux_2_28", "musllinux_1_2"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_there_is_one_wheel_for_each_target(python, libc, machine):
    target = Target(python=python, platform=f"{libc}_{machine}")
    (file,) = decompressor_lock(target).files
    name, version, _, tags = parse_wheel_filename(file.filename)
    assert (name, version, name) == (file.name, file.version, "zstandard")
    assert not tags.isdisjoint(target.tags())
    assert {tag.interpreter for tag in tags} == {target.python_tag}
    short = short_name(file.filename)  # a tar header has room for 100 bytes
    assert len(short) <= 100
    assert re.fullmatch(r"zstandard-[\d.]+-cp\d+-cp\d+-\w+\.whl", short)


def test_a_python_with_zstd_of_its_own_needs_none():
    newer = Target(python="3.14", platform=HOST.platform)
    assert decompressor_lock(newer) is None
    # Unless the bundle brings it: another Python unpacks that.
    assert "-cp313-" in decompressor_lock(newer, bundled_python=True).files[0].filename
    same = Target(python="3.12", platform=HOST.platform)
    assert decompressor_lock(same, bundled_python=True) == decompressor_lock(same)


@pytest.mark.parametrize(
    ("python", "platform"),
    [("3.8", "manylinux_2_28_x86_64"), ("3.11", "manylinux_2_28_mips64"),
     ("3.11", "manylinux_2_5_x86_64")],
)  # fmt: skip
def test_a_target_without_a_wheel_is_named(python, platform):
    with pytest.raises(ResolveError, match=rf"Python {python} on {platform}") as caught:
        decompressor_lock(Target(python=python, platform=platform))
    assert "3.9" in caught.value.hint


def test_the_digest_is_that_of_the_published_file(zstandard_wheel):
    lock = decompressor_lock(HOST)
    assert lock.files[0].filename == zstandard_wheel.name
    assert lock.files[0].sha256 == digest_file(zstandard_wheel)
