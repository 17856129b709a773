"""Bills of materials, held against the schema of CycloneDX by its own validator."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from stager import __version__
from stager.core.store import Store, digest_file
from stager.inventory.cyclonedx_document import FILES_LIMIT
from stager.inventory.inventory import Inventory, InventoryItem, inventory, sbom
from stager.inventory.package_metadata import Licence
from stager.pack.bundle_file import ChosenBundle
from tests.support.building import Project
from tests.support.bundles import make_bundle
from tests.support.wheelhouse import make_wheel

HOSTILE = """\
License: \x1b]0;title\x07 {long}
Classifier: License :: \x9b2J\u202e <script>alert(1)</script>
Classifier: License :: MIT License
Summary: {long}
Requires-Dist: beta; extra == '\x1b'
Requires-Dist: {nested}
"""


def valid(text: str) -> dict[str, Any]:
    """Return a document that its own library finds to be right, with the formats of values."""
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found: dict[str, Any] = json.loads(text)
    return found


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {component["name"]: component for component in document["components"]}


def needed(document: dict[str, Any]) -> dict[str, list[str]]:
    """Return the graph by names."""
    project = document["metadata"]["component"]
    names = {one["bom-ref"]: one["name"] for one in (*document["components"], project)}
    return {
        names[entry["ref"]]: sorted(names[ref] for ref in entry.get("dependsOn", []))
        for entry in document["dependencies"]
    }


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in component.get("properties", [])}


def bundled(folder: Path, wheels: Sequence[Path], locks: Sequence[Path] = ()) -> Inventory:
    packed = make_bundle(Store(folder / "store"), wheels, decompressor=None, packages=("alpha",))
    return inventory(ChosenBundle(path=packed.path), locks)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """A package that needs another one in a circle, and a third that nobody needs."""
    folder = tmp_path_factory.mktemp("sbom")
    wheels = [
        make_wheel(folder, "alpha", requires=["beta"], metadata_extra="License-Expression: MIT"),
        make_wheel(folder, "beta", "2.0+cpu", requires=["alpha"], metadata_extra="License: BSD"),
        make_wheel(folder, "gamma", metadata_extra="License-Expression: MIT OR Apache-2.0"),
    ]
    lock = folder / "pylock.toml"
    address = "https://me:secret@index.example/alpha-1.0-py3-none-any.whl"
    git = f"git+https://host.example/x.git@{'1' * 40}"
    lock.write_text(
        'lock-version = "1.0"\ncreated-by = "stager"\n[[packages]]\nname = "alpha"\n'
        f'wheels = [{{ url = "{address}", hashes = {{ sha256 = "{digest_file(wheels[0])}" }} }}]\n'
        '[[packages]]\nname = "beta"\nwheels = [{ path = "beta-2.0+cpu-py3-none-any.whl", '
        f'hashes = {{ sha256 = "{digest_file(wheels[1])}" }} }}]\n'
        f'[tool.stager.sources]\n"beta-2.0+cpu-py3-none-any.whl" = "{git}"\n'
    )
    return bundled(folder, wheels, [lock])


def test_a_package_with_all_that_is_known(found: Inventory) -> None:
    document = valid(sbom(found))
    alpha = by_name(document)["alpha"]
    sha256 = [{"alg": "SHA-256", "content": found.packages[0].sha256}]
    assert alpha == {
        "bom-ref": found.packages[0].id,
        "type": "library",
        "name": "alpha",
        "version": "1.0",
        "purl": "pkg:pypi/alpha@1.0",
        "hashes": sha256,
        "licenses": [{"license": {"acknowledgement": "declared", "id": "MIT"}}],
        "externalReferences": [
            {
                "type": "distribution",
                "url": "https://index.example/alpha-1.0-py3-none-any.whl",
                "hashes": sha256,
            }
        ],
        "properties": [
            {"name": "stager:hashes", "value": "of the wheel"},
            {"name": "stager:licence-field", "value": "License-Expression"},
        ],
    }
    assert "secret" not in sbom(found)


def test_local_versions_repositories_and_expressions(found: Inventory) -> None:
    components = by_name(valid(sbom(found)))
    commit = "1" * 40
    beta = components["beta"]
    assert beta["version"] == "2.0+cpu"
    assert beta["purl"].startswith("pkg:pypi/beta@2.0%2Bcpu?vcs_url=git%2Bhttps://host.example/")
    assert beta["externalReferences"] == [
        {"type": "vcs", "url": f"git+https://host.example/x.git@{commit}"}
    ]
    assert beta["licenses"] == [{"license": {"acknowledgement": "declared", "name": "BSD"}}]
    assert components["gamma"]["licenses"] == [
        {"acknowledgement": "declared", "expression": "MIT OR Apache-2.0"}
    ]
    assert "externalReferences" not in components["gamma"]


def test_the_graph_and_what_the_document_is_about(found: Inventory) -> None:
    document = valid(sbom(found))
    graph = needed(document)
    assert (graph["alpha"], graph["beta"], graph["gamma"]) == (["beta"], ["alpha"], [])
    assert graph["demo"] == ["alpha", "gamma", "node.pyz"]
    about = document["metadata"]["component"]
    assert (about["type"], about["name"]) == ("application", "demo")
    assert about["version"] == found.manifest.id[:12]
    assert properties(about)["stager:bundle-id"] == found.manifest.id
    assert properties(about)["stager:python"] == found.manifest.requires.python
    assert document["metadata"]["tools"]["components"] == [
        {"type": "application", "name": "stager", "version": __version__}
    ]
    node = by_name(document)["node.pyz"]
    assert node["hashes"][0]["content"] == found.manifest.node.sha256


def test_the_same_bundle_makes_the_same_document(found: Inventory) -> None:
    document = valid(sbom(found))
    assert sbom(found) == sbom(found)
    expected = uuid.uuid5(uuid.NAMESPACE_URL, f"stager:bundle:{found.manifest.id}")
    assert document["serialNumber"] == f"urn:uuid:{expected}"
    assert document["metadata"]["timestamp"] == found.written.isoformat()


def test_models_and_data_sets(found: Inventory) -> None:
    commit = "c" * 40
    model = InventoryItem(
        id="1" * 64,
        kind="model",
        name="org/Tiny",
        version=commit,
        sha256="a" * 64,
        licence=Licence(names=("Apache-2.0",), spdx=True, field="card"),
        files=(("config.json", "b" * 64),),
    )
    data = replace(model, id="2" * 64, kind="dataset", name="org/news", licence=Licence())
    alone = replace(model, id="3" * 64, kind="dataset", name="ag_news")
    many = tuple((f"{n}.txt", "") for n in range(FILES_LIMIT + 1))
    local = replace(model, id="4" * 64, kind="file", name="rows", version="", files=many)
    document = valid(sbom(replace(found, assets=(model, data, alone, local))))
    components = by_name(document)
    tiny = components["Tiny"]
    assert (tiny["type"], tiny["group"]) == ("machine-learning-model", "org")
    assert (tiny["version"], tiny["licenses"][0]["license"]["id"]) == (commit, "Apache-2.0")
    (file,) = tiny["components"]
    assert (file["type"], file["name"]) == ("file", "config.json")
    assert file["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    assert properties(tiny) == {"stager:files": "1", "stager:tree-sha256": "a" * 64}
    for name, place in (
        ("Tiny", "org/Tiny"),
        ("news", "datasets/org/news"),
        ("ag_news", "datasets/ag_news"),
    ):
        assert components[name]["purl"] == f"pkg:huggingface/{place}@{commit}"
    assert components["news"]["type"] == "data"
    assert "licenses" not in components["news"]
    rows = components["rows"]
    assert not {"purl", "components"} & set(rows)
    assert properties(rows)["stager:files"] == str(FILES_LIMIT + 1)
    assert {"Tiny", "news", "ag_news", "rows"} <= set(needed(document)["demo"])


def test_hostile_metadata_is_text_and_bounded(tmp_path: Path) -> None:
    extra = HOSTILE.format(long="x" * 200_000, nested="b; " + "(" * 500)
    wheels = [make_wheel(tmp_path, "alpha", metadata_extra=extra), make_wheel(tmp_path, "beta")]
    text = sbom(bundled(tmp_path, wheels))
    alpha = by_name(valid(text))["alpha"]
    names = [one["license"].get("name", "") for one in alpha["licenses"]]
    assert any("<script>" in name for name in names)
    assert text.isascii()
    assert all(ord(character) >= 32 or character == "\n" for character in text)
    assert "\\u001b" not in text
    assert "\\u202e" not in text.replace("\\\\u202e", "")
    assert len(text) < 20_000


def test_names_that_no_package_url_can_have(found: Inventory, tmp_path: Path) -> None:
    """A hostile bundle may say anything; what is written is still a document."""
    asset = InventoryItem(
        id="1" * 64,
        kind="model",
        name="org/",
        version="x/../@?#",
        sha256="a" * 64,
        licence=Licence(names=("(", "MIT"), field="card"),
        files=(("f", ""),),
    )
    packages = (replace(found.packages[0], name="", version="", requires=()),)
    changed = replace(found, packages=packages, direct=("",), assets=(asset,))
    document = valid(sbom(changed))
    assert [one["bom-ref"] for one in document["components"] if not one["name"]]
    assert "purl" not in by_name(document)[""]

    long = "a" * 210
    wheels = [make_wheel(tmp_path, long, requires=["beta"]), make_wheel(tmp_path, "beta")]
    wheels.append(make_wheel(tmp_path, "gamma", requires=[long]))
    graph = needed(valid(sbom(bundled(tmp_path, wheels))))
    assert graph["gamma"] == [f"{'a' * 197}..."]


def test_without_the_library_the_extra_is_named(project: Project, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "w", "alpha")
    packed = make_bundle(Store(tmp_path / "s"), [wheel], decompressor=None)
    (tmp_path / "cyclonedx.py").write_text("raise ImportError('none here')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    done = project.stager("inspect", "--sbom", str(packed.path), env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "in the clone of stager: uv tool install --reinstall '.[sbom]'" in done.stderr
    assert "pip install 'cyclonedx-python-lib>=11.7,<12'" in done.stderr
    assert "Traceback" not in done.stderr
    done = project.stager("inspect", "--licenses", str(packed.path), env=env)
    assert done.returncode == 0, done.stderr
