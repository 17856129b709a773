"""What the shared libraries in wheels need of the C library, whatever their tags say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stager.core.errors import BundleError, WheelError
from stager.core.store import Store
from stager.core.values import Target
from stager.layers.layer_build import make_layers
from stager.layers.source import LayerSource
from stager.pack.bundle import FILE_NAME, file_needs, requires
from tests.support.bundles import wheel
from tests.support.shared_objects import AARCH64, glibc, musl
from tests.support.wheelhouse import make_wheel

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
        self.wheels.append(make_wheel(self.folder, name, files={f"{name}/a.py": "A = 1", **files}))
        return self.tagged(tag)

    def tagged(self, tag):
        """Give the last wheel another tag."""
        last = self.wheels.pop()
        self.wheels.append(last.rename(str(last).replace("py3-none-any", tag)))
        return self

    def needs(self, target=TARGET, prune=()):
        """Make the layers; return what they need."""
        wheels = [wheel(path) for path in self.wheels]
        sources = [LayerSource.of_wheel(one, prune) for one in wheels]
        self.notes.clear()
        with self.store.lock():
            made = make_layers(sources, store=self.store, target=target, jobs=1)
            found = file_needs(wheels, made.layers, self.store, target, self.notes.append)
        self.requires = requires(target, wheels, files=found)
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


def test_a_tag_counts_where_no_file_needs_as_much(house):
    """Nobody notes that a file needs less than its tag, or than the tag of another package."""
    house.add("one", any=glibc("2.27"))
    house.add("two", "cp311-cp311-manylinux_2_28_x86_64", any=glibc("2.4"))
    assert len(house.needs()) == 2
    assert house.notes == []
    by = house.requires.libc_needed_by
    assert (house.requires.libc_version, by) == ("2.28", "two 1.0 (manylinux_2_28_x86_64)")


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


def test_a_library_for_musl_is_noted_and_needs_no_glibc(house):
    house.add("one", alpine=musl(), usual=glibc("2.17"))
    (need,) = house.needs()
    assert need.because == "one/usual.so"
    assert house.notes == ["one 1.0: one/alpine.so was built for musl, and the nodes have glibc"]


def test_a_library_for_glibc_is_noted_where_the_nodes_have_musl(house):
    house.add("one", "cp311-cp311-musllinux_1_1_x86_64", own=musl(), other=glibc("2.34"))
    assert house.needs(Target(python="3.11", platform="musllinux_1_2_x86_64")) == ()
    assert house.notes == ["one 1.0: one/other.so was built for glibc, and the nodes have musl"]
    assert (house.requires.libc, house.requires.libc_version) == ("musl", "1.1")


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


def test_what_was_found_in_layers_that_are_gone_is_forgotten(house):
    house.add("one", any=glibc("2.27")).needs()
    (gone,) = house.store.layers.iterdir()
    gone.unlink()
    house.wheels.clear()
    house.add("two", any=glibc("2.27")).needs()
    assert gone.name[:64] not in (house.store.root / FILE_NAME).read_text()


def _damage(layer):
    """Overwrite the frames, and leave the length and the head."""
    data = layer.read_bytes()
    layer.write_bytes(data[:-40] + bytes(40))
