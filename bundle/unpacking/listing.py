"""The list of all that an environment is made of: written as it is published, compared at each use.

It is the file ``.stager/listing``: the sha256 of what follows, a line ``{"bundle", "published"}``
with the bundle's id and a time by the file system's own clock, and for each directory one line
``[path, names, codes, links, layers]``: names with slashes between them, numbers with commas, the
targets of links by their names, and pairs of a layer's number and how many of the names are files
of it, which come first and in this order. A file's number is twice its size, plus one where it can
be executed; others are ``FOLDER``, ``LINK`` and ``OWN``, which each node writes for itself. (As an
object, a million names would take a second to read.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ..fs import read_file
from ..manifest import Digest, canonical_json
from .layer import Entry
from .merge import STATE

PATH = f"{STATE}/listing"
INTERPRETER = ("pyvenv.cfg", "bin/python")
"""What differs between nodes: both name the node's interpreter, and are renewed if it moves."""
FOLDER, LINK, OWN = -1, -2, -3


class ListingError(ValueError):
    """The listing is missing or damaged."""


class Listing(NamedTuple):
    """A listing that has been read, its digest checked."""

    published: int
    """When the environment was published, in nanoseconds by the file system's clock."""
    folders: Sequence[bytes]
    """A line for each directory."""


@dataclass(frozen=True)
class Folder:
    """What is in one directory."""

    names: dict[str, int]
    """What is to be found under each name; files of layers come first, in the layers' order."""
    links: dict[str, str]
    """The targets of links by their names."""
    layers: list[list[int]]
    """Numbers of layers, each with how many of the names are its files."""

    def line(self, path: str) -> bytes:
        """Return what the listing says of it."""
        codes = ",".join(map(str, self.names.values()))
        fields = [path, "/".join(self.names), codes, self.links, self.layers]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, line: bytes) -> tuple[str, Folder]:
        """Return the path and the content of a directory from its line."""
        path, names, codes, links, layers = json.loads(line)
        return path, cls(_listed(names, codes), links, layers)


def names_in(lines: Sequence[bytes]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the path of each directory and its names from several lines.

    Read together, and without the rest, they take half the time.
    """
    for path, names, codes, _, _ in json.loads(b"[%s]" % b",".join(lines)):
        yield path, _listed(names, codes)


def _listed(names: str, codes: str) -> dict[str, int]:
    return dict(zip(names.split("/"), map(int, codes.split(",")))) if names else {}


def contents(
    entries: Sequence[Sequence[Entry]],
    links: Mapping[str, str],
    own: Mapping[str, bytes],
    directories: Sequence[str],
) -> dict[str, Folder]:
    """For each directory what is in it.

    Args:
        entries: the files of the layers.
        links: the targets of all symbolic links by their paths.
        own: further files and their contents.
        directories: every directory but the top.
    """
    folders = {path: Folder({}, {}, []) for path in ("", *directories)}
    for number, layer in enumerate(entries):
        for path, files in groupby(layer, lambda entry: entry.path.rpartition("/")[0]):
            folder = folders[path]
            before, start = len(folder.names), len(path) + 1 if path else 0
            for entry in files:
                folder.names[entry.path[start:]] = 2 * entry.size + (entry.mode >> 6 & 1)
            folder.layers.append([number, len(folder.names) - before])
    others = {path: 2 * len(data) for path, data in own.items()}
    others.update(dict.fromkeys(links, LINK))
    others.update(dict.fromkeys(directories, FOLDER))
    others.update(dict.fromkeys((PATH, *INTERPRETER), OWN))
    for path, what in others.items():
        parent, _, name = path.rpartition("/")
        folders[parent].names[name] = what
        if what == LINK:
            folders[parent].links[name] = links[path]
    return folders


def write(env_dir: str, bundle_id: str, folders: Mapping[str, Folder]) -> None:
    """Write the listing of an environment in which everything else is there."""
    with open(os.path.join(env_dir, PATH), "xb") as handle:
        # What was written before is not newer than this file, by whatever clock there is.
        published = os.fstat(handle.fileno()).st_mtime_ns
        lines = [canonical_json({"bundle": bundle_id, "published": published})]
        lines += (folder.line(path) for path, folder in folders.items())
        body = b"\n".join(lines)
        handle.write(Digest.of(body).encode() + b"\n" + body)
        handle.flush()
        os.fsync(handle.fileno())


def published(env_dir: str) -> int:
    """When an environment was published, in nanoseconds; -1 where that is not known."""
    try:
        return read(env_dir).published
    except ListingError:
        return -1


def read(env_dir: str) -> Listing:
    """Read a listing.

    Raises:
        ListingError: it is missing, damaged, or of another environment.
    """
    try:
        data = read_file(os.path.join(env_dir, PATH))
    except OSError as exc:
        raise ListingError(exc.strerror or str(exc)) from exc
    digest, _, body = data.partition(b"\n")
    if Digest.of(body).encode() != digest:
        raise ListingError("it does not have the digest it begins with")
    head, *lines = body.split(b"\n")
    about = json.loads(head)
    if about["bundle"] != os.path.basename(env_dir):
        raise ListingError(f"it is that of bundle {about['bundle'][:12]}")
    return Listing(int(about["published"]), lines)
