"""Looking into a bundle: the same numbers as the file and the layers themselves give."""

from __future__ import annotations

import hashlib

import pytest

from bundle.protocol.codec import encode
from stager.core.errors import BundleError
from stager.pack.members import InspectedFile, inspect, inspect_files
from tests.support.building import HOST, SITE, contents


def test_the_summary_agrees_with_the_bundle(project):
    packed = project.build().packed
    result = inspect(packed.path)
    assert (result.id, result.name) == (packed.manifest.id, "project")
    assert result.python == HOST.python
    assert result.platform == f"{HOST.machine}, any {HOST.libc[0]}"
    assert result.bundle_bytes == packed.manifest.size
    assert result.imports == ("alpha",)
    kinds = [(layer.kind, layer.name, layer.version) for layer in result.layers]
    assert kinds == [
        ("wheel", "alpha", "1.0"),
        ("wheel", "beta", "2.0"),
        ("project", "project", ""),
        ("trainer", "trainer", ""),
    ]
    assert result.files == sum(layer.files for layer in result.layers)
    assert result.unpacked_bytes == sum(layer.unpacked_bytes for layer in result.layers)
    assert "listing" not in encode(result)


def test_the_listing_names_every_file_with_its_digest(project):
    packed = project.build().packed
    listing = inspect_files(packed.path).listing
    found = {}
    for layer in packed.manifest.layers:
        for path, data in contents(project.store.layer(layer.id)).items():
            digest = hashlib.sha256(data).hexdigest()
            found[path] = InspectedFile(layer=layer.name, path=path, size=len(data), sha256=digest)
    assert listing == tuple(found[file.path] for file in listing)
    assert len(listing) == len(found)
    assert f"{SITE}/alpha/__init__.py" in found


def test_a_compiled_wheel_shows_what_the_node_must_have(project, native_wheel):
    project.settings(str(native_wheel))
    needs = ".".join(map(str, HOST.libc[1]))
    result = inspect(project.build().packed.path)
    assert result.platform == f"{HOST.machine}, {HOST.libc[0]} {needs} or newer"


def test_damage_in_an_index_is_a_bundle_error(project):
    packed = project.build().packed
    data = bytearray(packed.path.read_bytes())
    data[data.index(b"heads/" + packed.manifest.layers[0].id.encode()) + 512 + 40] ^= 1
    packed.path.write_bytes(data)
    assert inspect(packed.path)
    with pytest.raises(BundleError, match="alpha"):
        inspect_files(packed.path)
