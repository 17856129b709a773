"""Writing the file that carries a bundle to a machine without a network."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from bundle.driver.code_store import compute_software_digest, list_stored_code, read_files
from bundle.format.archive import END
from bundle.format.manifest import (
    BLOCK,
    MANIFEST_NAME,
    FormatError,
    Manifest,
    ManifestError,
    count_padding,
    member_header,
    parse,
)
from bundle.protocol.codec import decode
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest, canonical_json

from ..building.current_bundle import Listener, current_bundle, offline_root
from ..config.load import Config
from ..core.errors import BundleError
from ..core.files import CARRIED_SUFFIX, read_bytes, write_output
from ..core.store import Store
from ..inventory.provenance import find_lock, list_possible_locks
from ..pack import bundle_file
from ..pack.bundle import short_name
from ..pack.bundle_file import LABEL_NAME, ChosenBundle
from ..pack.members import (
    CheckedMembers,
    MemberError,
    project_folder,
    refuse_in_project,
    write_member,
    write_members,
)
from ..trust import locate_signature, read_signature
from .tool import collect_tool

# --- The file that carries a bundle: a plain tar that says first what it holds -------------------

# Its members, in this order::
#
#     carried.json      what the file holds: the bundle's id, what is left out, the digests of the
#                       files that are not the bundle's
#     manifest.json     the bundle's manifest, whose id covers all that follows of the bundle
#     pylock.toml       the lock that the bundle was made from
#     bundle.sig        the bundle's signature, if it has one
#     tool/*.whl        stager itself, if it comes along
#     code/*            what earlier jobs have compiled, if it comes along
#     ...               the bundle's other members in the bundle's order, but for those of the base
#
# Every byte of it is checked, by the digests in ``carried.json``. Behind the tar's end there may be
# a program, which ``python3 FILE install`` starts.

FORMAT = 1
CARRIED_LOCK = "pylock.toml"
SIGNATURE_NAME = "bundle.sig"
TOOL = "tool/"
CODE = "code/"
_LABEL_LIMIT = 1 << 20
_PARTS_LIMIT = 512 << 20  # bytes of the parts, which are read whole
_CODE_LIMIT = 200 << 20  # of compiled code, which is a part of that
_OCTAL = re.compile(rb"[0-7]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SAME_VERSION = "use the same version on both sides; `stager export --with-tool` carries it"
_COPY_AGAIN = "the copy is damaged: copy it again, and compare `sha256sum` on both sides"


@dataclass(frozen=True, kw_only=True)
class CarriedPart:
    """A file that is carried besides the bundle's members, or the manifest."""

    name: str
    sha256: Digest
    size: int


@dataclass(frozen=True, kw_only=True)
class Label:
    """A carried file's description of itself."""

    name: str
    id: Digest
    base: str  # the id of the bundle that the other side has; empty if all is here
    left_out: tuple[str, ...]  # the bundle's members that are not here, because the base has them
    parts: tuple[CarriedPart, ...]  # the manifest and what is not the bundle's, in their order
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the content of ``carried.json``."""
        fields = asdict(self)
        return canonical_json({**fields, "digest": Digest.of(canonical_json(fields))})


def read_label(path: Path, data: bytes) -> Label:
    """Read ``carried.json``."""
    try:
        raw = json.loads(data)
        del raw["digest"]
        if (version := raw["format"]) != FORMAT:
            raise BundleError(
                f"{path} was written by another version of stager: its format is "
                f"{version!r}, this one reads {FORMAT}",
                hint=_SAME_VERSION,
            )
        label = decode(Label, raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise BundleError(f"{path}: {LABEL_NAME} cannot be read", hint=_COPY_AGAIN) from exc
    if label.to_bytes() != data:  # its digest is among them
        raise BundleError(f"{path}: {LABEL_NAME} has been changed", hint=_COPY_AGAIN)
    sizes = [part.size for part in label.parts]
    if min(sizes, default=0) < 0 or sum(sizes) > _PARTS_LIMIT:
        raise BundleError(
            f"{path}: {LABEL_NAME} names impossible sizes",
            hint="do not use this file; ask whoever sent it for what `stager export` wrote",
        )
    return label


class CarriedFile:
    """A carried file that is read from its beginning to its end."""

    def __init__(self, path: Path, handle: BinaryIO) -> None:
        """Read the label and the manifest; BundleError if the file is cut short or damaged."""
        self.path, self._handle = path, handle
        self.label = read_label(path, self._read_label())
        names = [part.name for part in self.label.parts]
        self._require(names[:1] == [MANIFEST_NAME], f"{LABEL_NAME} names no manifest first")
        self._refuse_short(())
        self.manifest = self._read_manifest()
        self._require(CARRIED_LOCK in names, f"{CARRIED_LOCK} is missing")
        self.members = CheckedMembers(self.manifest, files=True)
        left_out = {*self.label.left_out, MANIFEST_NAME}
        members = self.manifest.members()
        self._refuse_short([size for name, size in members if name not in left_out])

    def _read_label(self) -> bytes:
        header = self._read_up_to(BLOCK)
        octal = header[124:135]
        size = int(octal, 8) if _OCTAL.fullmatch(octal) else 0  # no sign, and no space
        if size <= _LABEL_LIMIT and header == member_header(LABEL_NAME, size):
            data = self._read(size)
            self._skip_padding(size)
            return data
        why = "is no file that `stager export` has written, or is damaged at its beginning"
        hint = "name the exported file; if this is it, copy it again"
        if header.startswith(MANIFEST_NAME.encode() + b"\0"):
            why = "is a bundle, which needs no import"
            hint = (
                f"use it as it is: stager verify --bundle {self.path}; where its offline root is "
                "not, take a file of `stager export` or of `stager build --output`"
            )
        raise BundleError(f"{self.path} {why}", hint=hint)

    def _read_manifest(self) -> Manifest:
        try:
            manifest = parse(self._read_part(self.label.parts[0]))
        except FormatError as exc:
            raise BundleError(
                f"{self.path} carries a bundle of another version of stager: {exc}",
                hint=_SAME_VERSION,
            ) from exc
        except ManifestError as exc:
            raise self._make_damage_error(str(exc)) from exc
        self._require(manifest.id == self.label.id, f"the manifest is that of {manifest.id[:12]}")
        is_name = _NAME.fullmatch(manifest.name) is not None  # it becomes part of a file's name
        self._require(is_name, f"no project is called {manifest.name!r}")
        return manifest

    def _read_part(self, part: CarriedPart) -> bytes:
        with self._check_frame(part.name, part.size):
            return self._read(part.size)

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of what is carried besides the bundle."""
        for part in self.label.parts[1:]:
            data = self._read_part(part)
            is_right = Digest.of(data) == part.sha256
            self._require(is_right, f"{part.name} does not have the digest that it must have")
            yield part.name, data

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the next member of the bundle, checked."""
        with self._check_frame(name, size):
            yield from self.members.pieces(name, self._read)

    def end(self) -> None:
        """Check that the tar ends here."""
        self._require(self._read(len(END)) == END, "more follows than it says")

    @contextlib.contextmanager
    def _check_frame(self, name: str, size: int) -> Iterator[None]:
        try:
            is_header = self._read(BLOCK) == member_header(name, size)
            self._require(is_header, f"{name} does not begin where it must")
            yield
        except (ManifestError, MemberError) as exc:  # no tar has a name like that; damage
            raise self._make_damage_error(str(exc)) from exc
        self._skip_padding(size)

    def _skip_padding(self, size: int) -> None:
        padding = self._read(count_padding(size))
        self._require(not padding.strip(b"\0"), "there are bytes between its members")

    def _refuse_short(self, members: Iterable[int]) -> None:
        """Refuse a file that cannot hold its parts, and members of the bundle of these sizes."""
        sizes = [len(self.label.to_bytes()), *(part.size for part in self.label.parts), *members]
        needed = sum(BLOCK + size + count_padding(size) for size in sizes) + len(END)
        actual = os.fstat(self._handle.fileno()).st_size
        if actual < needed:
            raise BundleError(
                f"{self.path} ends too early: it has {format_size(actual)} of "
                f"{format_size(needed)}",
                hint="the copy was interrupted: copy it again; nothing was imported",
            )

    def _read(self, size: int) -> bytes:
        data = self._read_up_to(size)
        self._require(len(data) == size, "it ends too early")
        return data

    def _read_up_to(self, size: int) -> bytes:
        try:
            return self._handle.read(size)
        except OSError as exc:
            raise BundleError(
                f"{self.path} cannot be read: {exc.strerror or exc}",
                hint="the disk or stick that it is on fails: copy it again, or use another",
            ) from exc

    def _require(self, is_right: bool, fault: str) -> None:
        if not is_right:
            raise self._make_damage_error(fault)

    def _make_damage_error(self, why: str) -> BundleError:
        return BundleError(f"{self.path} is damaged: {why}", hint=_COPY_AGAIN)


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The result of ``stager export``."""

    file: Path
    id: str
    sha256: str  # the digest of the whole file, to compare on the other side
    bytes: int
    layers: int
    layers_left_out: int
    base: str  # the id of the bundle that the other side has; empty if all is here
    with_tool: bool
    signed: bool


def _find_base(store: Store, name: str, options: ExportOptions) -> Manifest | None:
    if options.base:
        return _find_base_by_id(store, options.base)
    if options.since is None:
        return None
    limit = options.since.timestamp()
    known = [(time, manifest) for time, manifest in _list_exported(store) if manifest.name == name]
    before = [manifest for time, manifest in known if time < limit]
    if before:
        return before[-1]
    times = [f"{datetime.datetime.fromtimestamp(time):%F %T}" for time, _ in known]
    raise BundleError(
        f"no bundle of {name} was exported before {options.since:%F %T}",
        hint="leave out --since to carry all of it",
        context=[f"exported at {time}" for time in times],
    )


def _list_exported(store: Store) -> list[tuple[float, Manifest]]:
    found = []
    for path in store.exports.glob("*.json"):
        with contextlib.suppress(OSError, ManifestError):  # that of another version
            found.append((path.stat().st_mtime, parse(read_bytes(path))))
    return sorted(found, key=lambda pair: pair[0])


def _find_base_by_id(store: Store, asked: str) -> Manifest:
    found = {item.id: item for _, item in _list_exported(store) if item.id.startswith(asked)}
    if len(found) > 1:
        raise BundleError(
            f"--base {asked} names more than one bundle",
            hint="give more of its digits",
            context=sorted(found),
        )
    if found:
        return found.popitem()[1]
    try:
        chosen = bundle_file.find_by_id(store, asked)
        return bundle_file.read_manifest(chosen.path, chosen.id)
    except BundleError as exc:
        raise BundleError(
            f"the bundle {asked} that --base names is not known in {store.root}: it was neither "
            "exported from here, nor is it here",
            hint="`stager import` on the other side has shown its id; or leave out --base",
        ) from exc


def list_shared_members(manifest: Manifest) -> frozenset[tuple[str, int, str]]:
    """Return name, size and digest of what one bundle may take from another."""
    parts = [part for part in (manifest.node, manifest.decompressor) if part is not None]
    found = {(part.name, part.size, str(part.sha256)) for part in parts}
    for layer in manifest.layers:  # the head of each has the digests of its frames
        found |= {(name, size, str(layer.head)) for name, size in layer.members}
    return frozenset(found)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    bundle: ChosenBundle | None = None  # None for the project's, made current
    output: Path | None = None  # the file to write; None for one in the current directory
    base: str = ""  # the id of the bundle that the other side has, or its first digits
    since: datetime.datetime | None = None
    with_tool: bool = False
    offline: bool = False  # true if nothing may be fetched for that
    with_code: bool = False  # true to add what earlier jobs have compiled


def export_project(config: Config, options: ExportOptions, listener: Listener) -> ExportResult:
    """Write a bundle, or what the other side lacks of it, to a file to carry."""
    if options.output is not None:
        refuse_in_project(options.output, project_folder(config), CARRIED_SUFFIX)
    chosen = options.bundle or current_bundle(config, listener)
    manifest = bundle_file.read_manifest(chosen.path, chosen.id)
    store = Store(offline_root(config))
    base = _find_base(store, manifest.name, options)
    since = "" if base is None else f"-since-{base.id[:12]}"
    name = f"{manifest.name}-{manifest.id[:12]}{since}{CARRIED_SUFFIX}"
    output = (options.output or Path(name)).absolute()
    program = b""
    files: dict[str, bytes] = {}
    with (
        store.lock(lambda: listener.note(f"waiting for another build in {store.root}")),
        store.scratch("export") as scratch,
    ):
        lock = _read_lock(config, chosen)
        if options.with_tool:
            listener.begin("tool")
            wheels, program = collect_tool(
                config, store, scratch, offline=options.offline, progress=listener.note
            )
            files = {TOOL + short_name(wheel.name): read_bytes(wheel) for wheel in wheels}
        listener.begin("export")
        if options.with_code:
            code = _read_code(store, manifest, listener.note)
            files |= {CODE + name: data for name, data in code.items()}
        return export(chosen, output, store, lock=lock, base=base, more=(files, program))


def _read_code(store: Store, manifest: Manifest, note: Callable[[str], None]) -> dict[str, bytes]:
    software, files = compute_software_digest(manifest), dict[str, bytes]()
    found = list_stored_code(str(store.compiled_code), software) if software else []
    size = sum(code.bytes for code in found)
    if size > _CODE_LIMIT:
        raise BundleError(
            f"--with-code: {format_size(size)} of compiled code is more than a file carries "
            f"({format_size(_CODE_LIMIT)})",
            hint="set launch.compile-cache-limit lower, and let one more job remove the oldest",
        )
    for code in found:
        try:
            files |= read_files(code)
        except OSError as exc:
            raise BundleError(
                f"--with-code: {code.path} cannot be read: {exc.strerror or exc}",
                hint="remove it, or leave out --with-code",
            ) from exc
    if not files:
        raise BundleError(
            f"{store.root} has no compiled code for {manifest.name}",
            hint="a job that compiles leaves some: stager build --warm -- train.py --smoke",
        )
    kernels = format_count(sum(code.kernels for code in found), "kernel")
    what = f"with compiled code ({format_size(size)}, {kernels})"
    note(f"{what}, which `stager import --with-code` takes")
    return files


def _read_lock(config: Config, chosen: ChosenBundle) -> bytes:
    locks = list_possible_locks(chosen.path, config)
    found = find_lock(chosen, locks)
    if found is not None:
        return read_bytes(found)
    raise BundleError(
        f"the lock that {chosen.path} was made from is not here, and would have to come along",
        hint="export it in its project's folder; or carry the file itself, which `--bundle` takes",
        context=[f"not its lock, or not there: {path}" for path in locks],
    )


def export(
    chosen: ChosenBundle,
    output: Path,
    store: Store,
    *,
    lock: bytes,
    base: Manifest | None = None,
    more: tuple[Mapping[str, bytes], bytes] = (MappingProxyType({}), b""),
) -> ExportResult:
    """Write a bundle, or what the other side lacks of it, to a file, with files and a program."""
    files, program = more
    with bundle_file.open_bundle(chosen.path, chosen.id) as bundle:
        manifest = bundle.manifest
        known = list_shared_members(base) if base else frozenset()
        shared = {name for name, _, _ in known & list_shared_members(manifest)}
        parts = {MANIFEST_NAME: manifest.to_bytes(), CARRIED_LOCK: lock}
        signature = read_signature(locate_signature(chosen.path))
        if signature is not None:
            parts[SIGNATURE_NAME] = signature.encode()
        parts |= files
        label = Label(
            name=manifest.name,
            id=manifest.id,
            base=base.id if base else "",
            left_out=tuple(name for name, _ in manifest.members() if name in shared),
            parts=tuple(
                CarriedPart(name=name, sha256=Digest.of(data), size=len(data))
                for name, data in parts.items()
            ),
        )
        with write_output(output) as handle:
            out = _Digesting(handle)
            for name, data in {LABEL_NAME: label.to_bytes(), **parts}.items():
                write_member(out, name, len(data), (data,))
            # It refuses what is damaged in the store, so that it does not cross the gap.
            write_members(bundle, out, {MANIFEST_NAME, *label.left_out})
            out.write(program)
    _note_export(store, manifest)
    carried = sum(layer.member not in shared for layer in manifest.layers)
    return ExportResult(
        file=output,
        id=manifest.id,
        sha256=out.digest.hexdigest(),
        bytes=out.size,
        layers=carried,
        layers_left_out=len(manifest.layers) - carried,
        base=label.base,
        with_tool=bool(program),
        signed=signature is not None,
    )


def _note_export(store: Store, manifest: Manifest) -> None:
    note = store.exports / f"{manifest.id}.json"
    with contextlib.suppress(OSError):
        if read_bytes(note) == manifest.to_bytes():  # its time is that of the first export
            return
    with store.publish(note) as partial:
        partial.write_bytes(manifest.to_bytes())


class _Digesting:
    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._handle.write(data)
        self.digest.update(data)
        self.size += len(data)
