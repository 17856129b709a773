"""The inventory of a bundle as a CycloneDX document.

The model and the JSON are those of ``cyclonedx-python-lib``, which is imported here alone.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping

from cyclonedx.contrib.license.exceptions import InvalidSpdxLicenseException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License, LicenseAcknowledgement
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from bundle.format.manifest import PYTHON

from .. import __version__
from .inventory import Inventory, InventoryItem
from .package_metadata import Licence

FILES_LIMIT = 1000  # files of an asset that are listed; of more, only the number is
_TYPES = {
    "model": ComponentType.MACHINE_LEARNING_MODEL,
    "dataset": ComponentType.DATA,
    "space": ComponentType.APPLICATION,
    "file": ComponentType.DATA,
    "trainer": ComponentType.LIBRARY,
    "program": ComponentType.APPLICATION,
    PYTHON: ComponentType.PLATFORM,
}
_REFERENCES = {
    "wheel": ExternalReferenceType.DISTRIBUTION,
    "sdist": ExternalReferenceType.SOURCE_DISTRIBUTION,
    "vcs": ExternalReferenceType.VCS,
}
_DECLARED = LicenseAcknowledgement.DECLARED


def document(inventory: Inventory) -> str:
    """Return the JSON of CycloneDX 1.6."""
    manifest = inventory.manifest
    packages = {package.name: _package(package) for package in inventory.packages}
    parts = [part for part in inventory.parts if part.kind != "project"]
    others = [*map(_asset, inventory.assets), *map(_part, parts)]
    project = _project(inventory)
    tool = Component(type=ComponentType.APPLICATION, name="stager", version=__version__)
    bom = Bom(
        components=[*packages.values(), *others],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"stager:bundle:{manifest.id}"),
        metadata=BomMetaData(
            tools=ToolRepository(components=[tool]), component=project, timestamp=inventory.written
        ),
    )
    bom.register_dependency(project, [*(packages[name] for name in inventory.direct), *others])
    for package in inventory.packages:
        needed = [packages[name] for name in package.requires]
        bom.register_dependency(packages[package.name], needed)
    text = str(JsonV1Dot6(bom).output_as_string(indent=2))
    return text.replace("\x7f", "\\u007f") + "\n"


def _project(inventory: Inventory) -> Component:
    manifest, needs = inventory.manifest, inventory.manifest.requires
    tree = next((part.sha256 for part in inventory.parts if part.kind == "project"), "")
    properties = {
        "bundle-id": manifest.id,
        "python": needs.python,
        "machine": needs.machine,
        "libc": needs.libc,
        "libc-version": "" if needs.libc_version == "0.0" else needs.libc_version,
        "tree-sha256": tree,
    }
    return Component(
        type=ComponentType.APPLICATION,
        name=manifest.name,
        version=manifest.id[:12],
        bom_ref=manifest.id,
        properties=_properties(properties),
    )


def _package(package: InventoryItem) -> Component:
    source = package.provenance
    qualifiers = {"vcs_url": source.url} if source.kind == "vcs" and source.url else {}
    references = []
    if source.url:
        kind, url, hashes = _REFERENCES[source.kind], XsUri(source.url), _hashes(source.sha256)
        references.append(ExternalReference(type=kind, url=url, hashes=hashes))
    properties = {
        "hashes": "of the wheel",
        "licence-field": package.licence.field,
        "built-from": source.folder,
        "role": "decompressor" if package.kind == "decompressor" else "",
    }
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        bom_ref=package.id,
        hashes=_hashes(package.sha256),
        licenses=_licenses(package.licence),
        purl=_purl("pypi", "", package.name, package.version, qualifiers),
        external_references=references,
        properties=_properties(properties),
    )


def _asset(asset: InventoryItem) -> Component:
    owner, _, name = asset.name.rpartition("/") if asset.version else ("", "", asset.name)
    # The hub has its own path prefix for all but models.
    folder = owner if asset.kind == "model" else f"{asset.kind}s/{owner}"
    listed = asset.files if len(asset.files) <= FILES_LIMIT else ()
    make = functools.partial(Component, type=ComponentType.FILE)
    files = [
        make(name=path, bom_ref=f"{asset.id}/{number}", hashes=_hashes(sha256))
        for number, (path, sha256) in enumerate(listed)
    ]
    return Component(
        type=_TYPES[asset.kind],
        name=name,
        group=owner or None,
        version=asset.version or None,
        bom_ref=asset.id,
        licenses=_licenses(asset.licence),
        purl=_purl("huggingface", folder, name, asset.version, {}) if asset.version else None,
        components=files,
        properties=_properties({"files": str(len(asset.files)), "tree-sha256": asset.sha256}),
    )


def _purl(
    kind: str, folder: str, name: str, version: str, qualifiers: Mapping[str, str]
) -> PackageURL | None:
    """Return a package URL; None for a name (of a hostile bundle) that no package can have."""
    try:
        return PackageURL(kind, folder, name, version, dict(qualifiers))
    except ValueError:
        return None


def _part(part: InventoryItem) -> Component:
    if part.kind == "decompressor":
        return _package(part)
    is_program = part.kind == "program"
    return Component(
        type=_TYPES[part.kind],
        group=None if part.kind == PYTHON else "stager",
        name=part.name,
        version=part.version if part.kind == PYTHON else None,
        bom_ref=part.id,
        hashes=_hashes(part.sha256) if is_program else (),
        properties=_properties({} if is_program else {"tree-sha256": part.sha256}),
    )


def _hashes(sha256: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _licenses(licence: Licence) -> list[License]:
    """Convert licences; CycloneDX forbids an SPDX expression beside another licence."""
    make = LicenseFactory()
    if len(licence.names) == 1:
        return [make.make_from_string(licence.names[0], license_acknowledgement=_DECLARED)]
    found: list[License] = []
    for name in licence.names:
        try:
            found.append(make.make_with_id(name, acknowledgement=_DECLARED))
        except InvalidSpdxLicenseException:
            found.append(make.make_with_name(name, acknowledgement=_DECLARED))
    return found


def _properties(values: Mapping[str, str]) -> list[Property]:
    return [Property(name=f"stager:{name}", value=value) for name, value in values.items() if value]
