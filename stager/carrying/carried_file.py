"""The file that carries a bundle: a plain tar that says first what it holds.

Its members, in this order::

    carried.json      what the file holds: the bundle's id, what is left out, the digests of the
                      files that are not the bundle's
    manifest.json     the bundle's manifest, whose id covers all that follows of the bundle
    pylock.toml       the lock that the bundle was made from
    bundle.sig        the bundle's signature, if it has one
    tool/*.whl        stager itself, if it comes along
    ...               the bundle's other members in the bundle's order, but for those of the base

Every byte of it is checked: ``carried.json`` has its own digest, the headers follow from it and
from the manifest, and the members are compared with them. Behind the tar's end there may be a
program, which ``python3 FILE install`` starts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from bundle.format.archive import END
from bundle.format.manifest import (
    BLOCK,
    MANIFEST_NAME,
    FormatError,
    Manifest,
    ManifestError,
    member_header,
    padding,
    parse,
)
from bundle.protocol.codec import decode
from bundle.protocol.counts import sized
from bundle.protocol.digest import Digest, canonical_json

from ..core.errors import BundleError
from ..pack.bundle_file import LABEL_NAME
from ..pack.members import CheckedMembers, MemberError

FORMAT = 1
LOCK_NAME = "pylock.toml"
SIGNATURE_NAME = "bundle.sig"
TOOL = "tool/"
"""The names of the tool's wheels begin so."""
_LABEL_LIMIT = 1 << 20
_PARTS_LIMIT = 512 << 20
"""Bytes of what is carried besides the bundle's layers, as it is read whole: the manifest, the lock
and the tool's wheels."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SAME_VERSION = "use the same version on both sides; `stager export --with-tool` carries it"
_COPY_AGAIN = "the copy is damaged: copy it again, and compare `sha256sum` on both sides"


@dataclass(frozen=True, kw_only=True)
class CarriedPart:
    """A file that is carried besides the bundle's members, or the manifest."""

    name: str
    """Its name in the tar."""
    sha256: Digest
    """Its digest."""
    size: int
    """Its length in bytes."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """A carried file's description of itself."""

    name: str
    """The project's name."""
    id: Digest
    """The bundle's id."""
    base: str
    """The id of the bundle that the other side has; empty if all is here."""
    left_out: tuple[str, ...]
    """The bundle's members that are not here, because the base has them."""
    parts: tuple[CarriedPart, ...]
    """The manifest and what is not the bundle's, in the order of the tar."""
    format: int = FORMAT
    """Version of this layout."""

    def to_bytes(self) -> bytes:
        """Return the content of ``carried.json``."""
        fields = asdict(self)
        return canonical_json({**fields, "digest": Digest.of(canonical_json(fields))})


def read_label(path: Path, data: bytes) -> Label:
    """Read ``carried.json``.

    Raises:
        BundleError: it is damaged, or was written by another version; or its parts cannot have
            these sizes.
    """
    try:
        raw = json.loads(data)
        digest = raw.pop("digest")
        if raw["format"] != FORMAT:
            raise BundleError(
                f"{path} was written by another version of stager: its format is "
                f"{raw['format']!r}, this one reads {FORMAT}",
                hint=_SAME_VERSION,
            )
        label = decode(Label, raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise BundleError(f"{path}: {LABEL_NAME} cannot be read", hint=_COPY_AGAIN) from exc
    if label.to_bytes() != data or digest != Digest.of(canonical_json(asdict(label))):
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
        self.label = read_label(path, self._first())
        part = next((part for part in self.label.parts if part.name == MANIFEST_NAME), None)
        if part is None or part != self.label.parts[0]:
            raise self._damaged(f"{LABEL_NAME} does not name the manifest first")
        self._refuse_short(())
        try:
            self.manifest: Manifest = parse(b"".join(self.content(part.name, part.size)))
        except FormatError as exc:
            raise BundleError(
                f"{path} carries a bundle of another version of stager: {exc}", hint=_SAME_VERSION
            ) from exc
        except ManifestError as exc:
            raise self._damaged(str(exc)) from exc
        if self.manifest.id != self.label.id:
            raise self._damaged(f"the manifest is that of {self.manifest.id[:12]}")
        if not _NAME.fullmatch(self.manifest.name):  # it becomes part of a file's name
            raise self._damaged(f"no project is called {self.manifest.name!r}")
        if LOCK_NAME not in {part.name for part in self.label.parts}:
            raise self._damaged(f"{LOCK_NAME} is missing")
        self.members = CheckedMembers(self.manifest, files=True)
        left_out = {*self.label.left_out, MANIFEST_NAME}
        members = self.manifest.members()
        self._refuse_short([size for name, size in members if name not in left_out])

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the next member, whose name and size are known; its content is not checked here.

        Raises:
            BundleError: something else comes, or the file ends.
        """
        self._begin(name, size)
        yield self._read(size)
        self._end(size)

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of what is carried besides the bundle.

        Raises:
            BundleError: it is damaged.
        """
        for part in self.label.parts[1:]:
            data = b"".join(self.content(part.name, part.size))
            if Digest.of(data) != part.sha256:
                raise self._damaged(f"{part.name} does not have the digest that it must have")
            yield part.name, data

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the next member of the bundle, checked.

        Raises:
            BundleError: it is damaged, or the file ends.
        """
        self._begin(name, size)
        try:
            yield from self.members.pieces(name, self._read)
        except MemberError as exc:
            raise self._damaged(str(exc)) from exc
        self._end(size)

    def end(self) -> None:
        """Check that the tar ends here.

        Raises:
            BundleError: it does not.
        """
        if self._read(len(END)) != END:
            raise self._damaged("more follows than it says")

    def _first(self) -> bytes:
        header = self._read_up_to(BLOCK)
        size = 0
        try:
            if header[124:135].isdigit():  # no sign, and no space
                size = int(header[124:135], 8)
            expected = member_header(LABEL_NAME, size)
        except ValueError:
            expected = b""
        if not header:
            raise BundleError(
                f"{self.path} is empty", hint="the copy was interrupted: copy it again"
            )
        if header == expected and size <= _LABEL_LIMIT:
            data = self._read(size)
            self._end(size)
            return data
        if header.startswith(MANIFEST_NAME.encode() + b"\0"):
            raise BundleError(
                f"{self.path} is a bundle, which needs no import",
                hint=f"use it as it is: stager verify --bundle {self.path}",
            )
        raise BundleError(
            f"{self.path} is no file that `stager export` has written, or is damaged at its "
            "beginning",
            hint="name the exported file; if this is it, copy it again",
        )

    def _refuse_short(self, members: Iterable[int]) -> None:
        """Refuse a file that cannot hold its parts, and members of the bundle of these sizes."""
        sizes = [len(self.label.to_bytes()), *(part.size for part in self.label.parts), *members]
        needed = sum(BLOCK + size + padding(size) for size in sizes) + len(END)
        actual = os.fstat(self._handle.fileno()).st_size
        if actual < needed:
            raise BundleError(
                f"{self.path} ends too early: it has {sized(actual)} of {sized(needed)}",
                hint="the copy was interrupted: copy it again; nothing was imported",
            )

    def _begin(self, name: str, size: int) -> None:
        try:
            expected = member_header(name, size)
        except ManifestError as exc:  # no tar has a name like that
            raise self._damaged(str(exc)) from exc
        if self._read(BLOCK) != expected:
            raise self._damaged(f"{name} does not begin where it must")

    def _end(self, size: int) -> None:
        if self._read(padding(size)).strip(b"\0"):
            raise self._damaged("there are bytes between its members")

    def _read(self, size: int) -> bytes:
        data = self._read_up_to(size)
        if len(data) != size:
            raise self._damaged("it ends too early")
        return data

    def _read_up_to(self, size: int) -> bytes:
        try:
            return self._handle.read(size)
        except OSError as exc:
            raise BundleError(
                f"{self.path} cannot be read: {exc.strerror or exc}",
                hint="the disk or stick that it is on fails: copy it again, or use another",
            ) from exc

    def _damaged(self, why: str) -> BundleError:
        return BundleError(f"{self.path} is damaged: {why}", hint=_COPY_AGAIN)
