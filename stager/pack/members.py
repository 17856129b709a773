"""The members of a bundle, each byte checked against the manifest while it is copied."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from bundle.driver.code_store import compute_software_digest, list_stored_code
from bundle.format.archive import END, BundleFile
from bundle.format.layer import Index, LayerError, decode_head, read_origin
from bundle.format.manifest import MANIFEST_NAME, Layer, Manifest, count_padding, member_header
from bundle.node.node_root import ROOT_VARIABLE
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.protocol.problem import Problem

from ..config.load import Config
from ..core.errors import BundleError, ConfigError
from ..core.files import ANOTHER_OUTPUT, BUNDLE_SUFFIX, write_output
from ..core.processes import CommandError, run
from ..core.store import Store
from ..layers.layer_file import decompress_frame, decompress_index
from ..layers.prune import Pruned, sum_notes
from .bundle_file import ChosenBundle, open_bundle

Read = Callable[[int], bytes]  # returns the next bytes of a member, as many as are asked for


class Writable(Protocol):
    """A file, or what counts what is written to one."""

    def write(self, data: bytes, /) -> object:
        """Write all of it."""


class MemberError(Exception):
    """A member is not what the manifest says; its text says which, and why."""


class CheckedMembers:
    """Checks members in the bundle's order: the head of a layer tells what its frames must be."""

    def __init__(self, manifest: Manifest, *, files: bool = False) -> None:
        """``files`` checks each file, too: frame digests do not prove that the index is true."""
        self.manifest = manifest
        self._compare_files = files
        self._layers = {name: layer for layer in manifest.layers for name, _ in layer.members}
        self._parts = {part.name: part for part in (manifest.node, manifest.decompressor) if part}
        self._indexes: dict[str, Index] = {}  # by the name of the member that holds the frames

    def pieces(self, name: str, read: Read) -> Iterator[bytes]:
        """Yield a member's content, each piece once it is known to be right; else MemberError."""
        if name == MANIFEST_NAME:
            content = self.manifest.to_bytes()
            if read(len(content)) != content:
                raise MemberError(f"{name} is another one")
            yield content
        elif name in self._parts:
            part = self._parts[name]
            yield _check_digest(name, read(part.size), part.sha256)
        else:
            layer = self._layers[name]
            shown = describe_layer(layer)
            try:
                if name == layer.head_member:
                    head = _check_digest(shown, read(layer.head_size), layer.head)
                    yield self._check_head(layer, head)
                else:
                    yield from self._read_frames(shown, self._indexes[name], read)
            except LayerError as exc:
                raise MemberError(f"{shown}: {exc}") from exc

    def _check_head(self, layer: Layer, head: bytes) -> bytes:
        index = decode_head(head, decompress_index)
        if Digest(read_origin(head).id) != layer.id:
            raise LayerError("it was made from something else")
        if sum(frame.size for frame in index.frames) != layer.size - layer.head_size:
            raise LayerError("its frames do not add up to its size")
        self._indexes[layer.member] = index
        return head

    def _read_frames(self, name: str, index: Index, read: Read) -> Iterator[bytes]:
        files = _Files(index)
        for frame in index.frames:
            data = _check_digest(name, read(frame.size), frame.sha256)
            if self._compare_files:
                files.compare(decompress_frame(data, frame.unpacked_size))
            yield data


def _check_digest(name: str, data: bytes, expected: str) -> bytes:
    if hashlib.sha256(data).hexdigest() != expected:
        raise MemberError(f"{name} does not have the digest that it must have")
    return data


class _Files:
    def __init__(self, index: Index) -> None:
        self._waiting = deque(index.files)  # in the order in which they lie there
        self._digest = hashlib.sha256()
        self._start = 0

    def compare(self, content: bytes) -> None:
        """Compare the next frame; LayerError if a file that ends in it has another digest."""
        end = self._start + len(content)
        while self._waiting and self._waiting[0].offset < end:
            entry = self._waiting[0]
            begin = max(entry.offset - self._start, 0)
            self._digest.update(content[begin : entry.offset + entry.size - self._start])
            if entry.offset + entry.size > end:
                break
            if self._digest.hexdigest() != entry.sha256:
                raise LayerError(f"{entry.path} does not have the digest in the index")
            self._waiting.popleft()
            self._digest = hashlib.sha256()
        self._start = end


def refuse_damage(bundle: BundleFile) -> None:
    """Compare each byte of a bundle with its id; MemberError for damage, else NodeError."""
    members = CheckedMembers(bundle.manifest)
    for name, _ in bundle.manifest.members():
        for _ in members.pieces(name, make_reader(bundle, name)):
            pass


def write_member(out: Writable, name: str, size: int, pieces: Iterable[bytes]) -> None:
    """Write one member of a tar."""
    out.write(member_header(name, size))
    for piece in pieces:
        out.write(piece)
    out.write(bytes(count_padding(size)))


def write_members(bundle: BundleFile, out: Writable, left_out: Collection[str] = ()) -> None:
    """Write a bundle's members, each byte checked, and the end of a tar; may raise NodeError."""
    members = CheckedMembers(bundle.manifest)
    try:
        for name, size in bundle.manifest.members():
            if name in left_out:
                continue
            write_member(out, name, size, members.pieces(name, make_reader(bundle, name)))
    except MemberError as exc:
        raise BundleError(
            f"{bundle.path} is damaged: {exc}", hint="make it again with `stager build`"
        ) from exc
    out.write(END)


def make_reader(bundle: BundleFile, name: str) -> Read:
    """Return what reads a member of an open bundle from its beginning; it raises NodeError."""
    place = bundle.offset(name)

    def read(size: int) -> bytes:
        nonlocal place
        place += size
        return bundle.read(place - size, size)

    return read


def describe_layer(layer: Layer) -> str:
    """Return a layer's name for a message."""
    return f"{layer.name} {layer.version}".strip()


# --- A copy of the bundle at a place of the user's, which has all of it or nothing ---------------


def project_folder(config: Config) -> Path | None:
    """Return the project's folder; None where there are no settings of a project."""
    return config.project.path if config.source.is_file() else None


def refuse_in_project(output: Path, project: Path | None, suffix: str = BUNDLE_SUFFIX) -> None:
    """Refuse a place where a bundle's copy would become part of the project's next bundle."""
    if project is None or output.name.endswith(suffix):
        return
    place = Path(os.path.realpath(output.parent))  # `..` leads out, and links lead anywhere
    if place.is_relative_to(os.path.realpath(project)):
        raise ConfigError(
            f"--output {output} is in the project, and would be a part of its next bundle",
            hint=f"let its name end in {suffix}, which no project ships, or name another folder",
        )


def copy_to(bundle: Path, output: Path) -> Path:
    """Write all of a bundle to a file, in place of one that is there; return the file's path."""
    output = output.absolute()
    hint = f"{ANOTHER_OUTPUT}; the bundle itself is {bundle}"
    with write_output(output, hint=hint) as target, open_bundle(bundle) as source:
        write_members(source, target)
    return output


# --- Looking into a bundle without unpacking it --------------------------------------------------


@dataclass(frozen=True)
class InspectedLayer:
    """A layer of a bundle."""

    kind: str  # ``wheel``, ``project``, ``trainer`` or ``asset``
    name: str
    version: str  # its version, or the beginning of a model's or data set's commit; empty for none
    bytes: int
    unpacked_bytes: int
    files: int
    id: str


@dataclass(frozen=True, kw_only=True)
class InspectedRepository:
    """A model or data set of a hub in a bundle."""

    type: str  # ``model``, ``dataset`` or ``space``
    name: str
    commit: str
    licence: str  # the licence that its card names; empty if it names none
    left_out: int  # number of its files that were not taken
    left_out_files: tuple[str, ...]
    bytes: int
    unpacked_bytes: int


@dataclass(frozen=True)
class InspectedFile:
    """A file in a bundle."""

    layer: str
    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class InspectedSignature:
    """The signature beside a bundle."""

    file: Path
    accepted: bool  # true if one of the signers that the settings allow has signed this bundle
    signer: str  # who, as ``trust.allowed-signers`` calls them; empty if it is nobody of these
    key: str  # the key that has signed this bundle; empty if none has
    why: str  # why it is not accepted; empty if it is


@dataclass(frozen=True)
class InspectedCode:
    """What a job has compiled, in the offline root."""

    job_id: str
    machine: str  # the kind of node that it is for
    bytes: int
    kernels: int  # compiled functions: shared objects and GPU binaries


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of ``stager inspect``."""

    bundle: Path
    id: str
    name: str
    python: str
    platform: str  # the machine and the libc it needs
    bundle_bytes: int
    unpacked_bytes: int
    files: int
    imports: tuple[str, ...]
    layers: tuple[InspectedLayer, ...]
    pruned: Pruned
    hub: tuple[InspectedRepository, ...] = ()
    signature: InspectedSignature | None = None  # its signature; null if there is none beside it
    compiled: tuple[InspectedCode, ...] = ()  # by earlier jobs, for this bundle


@dataclass(frozen=True, kw_only=True)
class InspectionWithFiles(Inspection):
    """The result of ``stager inspect --files``."""

    listing: tuple[InspectedFile, ...]


def inspect(path: Path, *, asked: str = "", store: Store | None = None) -> Inspection:
    """Return what is in a bundle, and what is compiled for it in an offline root."""
    with open_bundle(path, asked) as bundle:
        return _inspection(path, bundle, store)


def inspect_files(
    path: Path, *, asked: str = "", store: Store | None = None
) -> InspectionWithFiles:
    """Return what is in a bundle, with every file; see :func:`inspect`."""
    with open_bundle(path, asked) as bundle:
        listing = tuple(
            InspectedFile(layer.name, entry.path, entry.size, entry.sha256)
            for layer in bundle.manifest.layers
            for entry in bundle.index(layer, bundle.head(layer), decompress_index).files
        )
        return InspectionWithFiles(**vars(_inspection(path, bundle, store)), listing=listing)


def _inspection(path: Path, bundle: BundleFile, store: Store | None) -> Inspection:
    manifest = bundle.manifest
    needs = manifest.requires
    is_any = needs.libc_version == "0.0"
    libc = f"any {needs.libc}" if is_any else f"{needs.libc} {needs.libc_version} or newer"
    return Inspection(
        bundle=path,
        id=manifest.id,
        name=manifest.name,
        python=needs.python,
        platform=f"{needs.machine}, {libc}",
        bundle_bytes=manifest.size,
        unpacked_bytes=manifest.unpacked_size,
        files=manifest.files,
        imports=manifest.imports,
        layers=tuple(
            InspectedLayer(
                *(one.kind, one.name, one.version, one.size, one.unpacked_size, one.files, one.id)
            )
            for one in manifest.layers
        ),
        pruned=sum_notes(bundle),
        hub=tuple(_repositories(bundle)),
        compiled=() if store is None else tuple(_list_compiled_code(store, manifest)),
    )


def _list_compiled_code(store: Store, manifest: Manifest) -> Iterator[InspectedCode]:
    software = compute_software_digest(manifest)
    for code in list_stored_code(str(store.compiled_code), software) if software else ():
        yield InspectedCode(code.job_id, code.machine, code.bytes, code.kernels)


def _repositories(bundle: BundleFile) -> Iterator[InspectedRepository]:
    for layer in bundle.manifest.layers:
        if layer.kind != "asset":
            continue
        said = read_origin(bundle.head(layer)).options.get("hub")
        if isinstance(said, dict):
            yield InspectedRepository(
                **{key: str(said.get(key, "")) for key in ("type", "name", "commit", "licence")},
                left_out=int(str(said.get("left-out", 0))),
                left_out_files=tuple(map(str, said.get("left-out-files", ()))),
                bytes=layer.size,
                unpacked_bytes=layer.unpacked_size,
            )


# --- A bundle that is unpacked on this machine, by the program that does so on nodes -------------

_SECONDS = 1200.0


def unpack_here(program: Path, bundle: ChosenBundle, folder: Path, *, trusted: bool) -> Path:
    """Make the environment of a bundle below a directory, and return its path."""
    python = getattr(sys, "_base_executable", sys.executable)
    argv = [sys.executable, "-I", "-S", str(program), "unpack", str(bundle.path), str(folder)]
    argv += ["--id", bundle.id, "--json", "--python", python, *(["--trusted"] if trusted else [])]
    done = run(argv, timeout=_SECONDS, env={ROOT_VARIABLE: str(folder)}, check=False)
    answer = done.stdout.rstrip("\n").rpartition("\n")[2]
    if done.returncode == 0:
        return Path(answer)
    try:
        problem = Problem.from_json(json.loads(answer)["problem"])
    except (ValueError, KeyError, TypeError):
        raise CommandError(done, reason="the bundle could not be unpacked") from None
    raise BundleError(f"{problem.where}: {problem.what}: {problem.why}", hint=problem.fix)
