"""The inventory of a real bundle agrees with the wheels, the lock and the files behind it."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path

import pytest

from stager.core.errors import BundleError, ConfigError
from stager.core.store import Store
from stager.inventory.inventory import Inventory, inventory, licence_list
from stager.inventory.provenance import Provenance
from stager.pack.bundle_file import ChosenBundle
from tests.support.building import Project
from tests.support.bundles import Raw, forge, make_bundle
from tests.support.wheelhouse import make_wheel


def of(path: Path, *locks: Path) -> Inventory:
    return inventory(ChosenBundle(path=path), locks)


def bundle_of(folder: Path, *wheels: Path) -> Path:
    return make_bundle(Store(folder / "store"), wheels, decompressor=None).path


def test_it_agrees_with_what_the_bundle_was_made_from(project: Project, wheelhouse: Path) -> None:
    """Two packages, the decompressor, the project, the trainer, and data of the user's."""
    (project.root / "data").mkdir()
    (project.root / "data" / "rows.csv").write_text("1,2\n")
    project.settings("alpha", more='[assets]\npaths = ["data"]')
    built = project.build()
    found = of(built.packed.path, built.lock.path)
    assert (found.manifest, found.bundle) == (built.packed.manifest, built.packed.path)
    wheels = {file.name: file for file in built.lock.files}
    assert [package.name for package in found.packages] == ["alpha", "beta"]
    for package in found.packages:
        assert package.version == str(wheels[package.name].version)
        assert package.sha256 == wheels[package.name].sha256
        assert package.provenance == Provenance(kind="wheel")  # a file of this machine
    assert [package.requires for package in found.packages] == [("beta",), ()]
    assert found.direct == ("alpha",)

    part = found.manifest.decompressor
    tool = next((one for one in found.parts if one.kind == "decompressor"), None)
    assert (tool is None) == (part is None)
    if tool is not None and part is not None:
        assert (tool.name, tool.version) == ("zstandard", "0.25.0")
        assert tool.sha256 == part.sha256
        assert tool.licence.text == "BSD-3-Clause"

    (asset,) = found.assets
    assert (asset.kind, asset.name, asset.version) == ("file", "data", "")
    assert asset.files == (("data/rows.csv", hashlib.sha256(b"1,2\n").hexdigest()),)
    assert {part.kind for part in found.parts} - {"decompressor"} == {
        "project",
        "trainer",
        "program",
    }


def test_the_time_is_that_of_the_file_or_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(tmp_path, make_wheel(tmp_path, "alpha"))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    os.utime(path, (0, 1_700_000_000.75))
    when = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.timezone.utc)
    assert of(path).written == when
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "60")
    assert of(path).written == when.fromtimestamp(60, datetime.timezone.utc)
    for wrong in ("yesterday", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(ConfigError, match=r"SOURCE_DATE_EPOCH is .* not a time"):
            of(path)


def test_components_without_a_licence_come_last(tmp_path: Path) -> None:
    wheels = [
        make_wheel(tmp_path, name, metadata_extra=extra)
        for name, extra in (("c", "License: MIT"), ("a", ""), ("b", "License: My\x1b[2J own"))
    ]
    listed = licence_list(of(bundle_of(tmp_path, *wheels)))
    assert [(one.name, one.licence, one.spdx) for one in listed.components] == [
        ("b", r"My\x1b[2J own", False),
        ("c", "MIT", True),
        ("a", "", False),
    ]
    assert listed.without_licence == 1


def test_a_layer_that_was_made_from_something_else_is_damage(tmp_path: Path) -> None:
    path = bundle_of(tmp_path, make_wheel(tmp_path, "alpha"))

    def manifest(raw: Raw) -> None:
        raw["layers"][0] = json.loads(json.dumps(raw["layers"][0]).replace("alpha", "omega"))

    with pytest.raises(BundleError, match=r"the layer of omega .* was made from wheel alpha"):
        of(forge(path, tmp_path / "forged.pkgs.tar", manifest=manifest))
