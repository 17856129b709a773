"""Writing the file that carries a bundle to a machine without a network."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bundle.format.archive import BundleFile
from bundle.format.manifest import MANIFEST_NAME, Manifest, ManifestError, parse
from bundle.protocol.digest import Digest

from ..core.errors import BundleError, StagerError
from ..core.files import bytes_of, replacing
from ..core.store import Store
from ..pack import bundle_file
from ..pack.bundle import short_name
from ..pack.members import write_member, write_members
from ..trust import read_signature, signature_of
from .carried_file import (
    LOCK_NAME,
    SIGNATURE_NAME,
    TOOL,
    CarriedPart,
    Label,
)
from .tool import CarriedTool


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The result of ``stager export``."""

    file: Path
    """The file to carry."""
    id: str
    """The bundle's id."""
    sha256: str
    """The digest of the whole file, to compare on the other side."""
    bytes: int
    """Its length."""
    layers: int
    """Number of layers in it."""
    layers_left_out: int
    """Number of layers that the other side has."""
    base: str
    """The id of the bundle that the other side has; empty if all is here."""
    with_tool: bool
    """True if stager itself comes along."""
    signed: bool
    """True if the bundle's signature comes along."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The bundle that the other side has."""

    id: str = ""
    """Its id, or the first digits of it; empty if it is not named so."""
    until: datetime.datetime | None = None
    """The time before which it was exported; None if it is not named so."""


def base_manifest(store: Store, name: str, base: Base) -> Manifest | None:
    """Return the manifest of the bundle that the other side has; None if it has none.

    Raises:
        BundleError: it is not known here.
    """
    if base.id:
        return _by_id(store, base.id)
    if base.until is None:
        return None
    limit = base.until.timestamp()
    known = [(time, manifest) for time, manifest in _exported(store) if manifest.name == name]
    before = [manifest for time, manifest in known if time < limit]
    if before:
        return before[-1]
    first = ""
    if known:
        first = f"; the first export was at {datetime.datetime.fromtimestamp(known[0][0]):%F %T}"
    raise BundleError(
        f"no bundle of {name} was exported before {base.until:%F %T}{first}",
        hint="leave out --since to carry all of it",
    )


def _exported(store: Store) -> list[tuple[float, Manifest]]:
    """Return the exported bundles with the times of their first exports, oldest first."""
    found = []
    for path in store.exports.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, parse(bytes_of(path))))
        except (OSError, ManifestError):
            continue  # of another version: its layers are not these
    return sorted(found, key=lambda pair: pair[0])


def _by_id(store: Store, asked: str) -> Manifest:
    found = {item.id: item for _, item in _exported(store) if item.id.startswith(asked)}
    if len(found) == 1:
        return next(iter(found.values()))
    if len(found) > 1:
        raise BundleError(
            f"--base {asked} names more than one bundle",
            hint="give more of its digits",
            context=sorted(found),
        )
    try:
        chosen = bundle_file.with_id(store, asked)
        return bundle_file.manifest_of(chosen.path, chosen.id)
    except BundleError as exc:
        raise BundleError(
            f"the bundle {asked} that --base names is not known in {store.root}: it was neither "
            "exported from here, nor is it here",
            hint="`stager import` on the other side has shown its id; or leave out --base",
        ) from exc


def members_of(manifest: Manifest) -> frozenset[tuple[str, int, str]]:
    """Return name, size and digest of what one bundle may take from another.

    The head of a layer has the digests of its frames, so its digest stands for both.
    """
    parts = [part for part in (manifest.node, manifest.decompressor) if part is not None]
    found = {(part.name, part.size, str(part.sha256)) for part in parts}
    for layer in manifest.layers:
        found |= {(name, size, str(layer.head)) for name, size in layer.members}
    return frozenset(found)


def export(
    chosen: bundle_file.ChosenBundle,
    output: Path,
    store: Store,
    *,
    lock: bytes,
    base: Manifest | None = None,
    tool: CarriedTool | None = None,
) -> ExportResult:
    """Write a bundle, or what the other side lacks of it, to a file.

    Raises:
        BundleError: the bundle is damaged.
        StagerError: the file cannot be written.
    """
    with bundle_file.opened(chosen.path, chosen.id) as bundle:
        manifest = bundle.manifest
        known = members_of(base) if base is not None else frozenset()
        left_out = [member[0] for member in _in_order(manifest) if member in known]
        beside = [(LOCK_NAME, lock)]
        signature = read_signature(signature_of(chosen.path))
        if signature is not None:
            beside.append((SIGNATURE_NAME, signature.encode()))
        wheels = tool.wheels if tool is not None else ()
        beside += [(TOOL + short_name(wheel.name), bytes_of(wheel)) for wheel in wheels]
        label = _label(manifest, base, left_out, beside)
        try:
            with replacing(output) as handle:
                out = _Digesting(handle)
                _write(out, bundle, label, beside)
                if tool is not None:
                    out.write(tool.program)
        except OSError as exc:
            raise StagerError(
                f"{output} cannot be written: {exc.strerror or exc}",
                hint="name another file with --output",
            ) from exc
    _remember(store, manifest)
    carried = sum(layer.member not in left_out for layer in manifest.layers)
    return ExportResult(
        file=output,
        id=manifest.id,
        sha256=out.digest.hexdigest(),
        bytes=out.size,
        layers=carried,
        layers_left_out=len(manifest.layers) - carried,
        base=label.base,
        with_tool=tool is not None,
        signed=signature is not None,
    )


def _remember(store: Store, manifest: Manifest) -> None:
    """Note that a bundle was exported; the time of the note is that of its first export."""
    note = store.exports / f"{manifest.id}.json"
    try:
        if bytes_of(note) == manifest.to_bytes():
            return
    except OSError:
        pass
    with store.publishing(note) as partial:
        partial.write_bytes(manifest.to_bytes())


class _Digesting:
    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._handle.write(data)
        self.digest.update(data)
        self.size += len(data)


def _in_order(manifest: Manifest) -> list[tuple[str, int, str]]:
    """Return what :func:`members_of` does, in the bundle's order."""
    digests = {name: (size, digest) for name, size, digest in members_of(manifest)}
    return [(name, *digests[name]) for name, _ in manifest.members() if name != MANIFEST_NAME]


def _label(
    manifest: Manifest,
    base: Manifest | None,
    left_out: Sequence[str],
    beside: Sequence[tuple[str, bytes]],
) -> Label:
    parts = [(MANIFEST_NAME, manifest.to_bytes()), *beside]
    return Label(
        name=manifest.name,
        id=manifest.id,
        base=base.id if base is not None else "",
        left_out=tuple(left_out),
        parts=tuple(
            CarriedPart(name=name, sha256=Digest.of(data), size=len(data)) for name, data in parts
        ),
    )


def _write(
    out: _Digesting, bundle: BundleFile, label: Label, beside: Sequence[tuple[str, bytes]]
) -> None:
    """Write the tar; refuse what is damaged in the store, so that it does not cross the gap."""
    manifest = bundle.manifest
    first = [(bundle_file.LABEL_NAME, label.to_bytes()), (MANIFEST_NAME, manifest.to_bytes())]
    for name, data in (*first, *beside):
        write_member(out, name, len(data), iter((data,)))
    write_members(bundle, out, {MANIFEST_NAME, *label.left_out})
