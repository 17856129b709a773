"""The content of an environment: which layer writes which file, and the list of everything."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby, repeat
from typing import NamedTuple

from ..format.layer import Entry, Index, LayerError, check_links, list_parents
from ..format.manifest import Layer
from ..protocol.digest import Digest, canonical_json
from ..system.files import error_text, read_file

# --- Several layers merged into one tree: which of them writes which file ------------------------

# Of equal files in several layers, and of documents at the top, the first one is written. Layers
# that disagree about another path are refused, and so is a path of the environment itself.

STATE = ".stager"  # the directory of an environment for its manifest and its listing
OWN_PYTHON = "python"  # the directory of an environment for the Python that a bundle brings
KEPT = ("layers", "decompressor")  # in it: layers' heads, and the wheel to unpack them

_DOCUMENT = re.compile(
    r"(lib/python[0-9.]+/site-packages/)?"
    r"(authors|changelog|changes|contributing|copying|history|licen[cs]e|notice|readme)"
    r"([-_.][\w.-]*)?(?<!\.py)(?<!\.so)",
    re.IGNORECASE,
)

HOOK = "_stager_"  # prefix of modules that interpreters run at start; no wheel has such
HOOKS = ("imports", "patches")  # the rest of their names
HOOK_MODULES = ("hub_datasets",)  # the rest of the names of modules that those import


class Merged(NamedTuple):
    """The content of an environment."""

    entries: tuple[tuple[Entry, ...], ...]  # the files that each layer writes
    links: dict[str, str]
    directories: tuple[str, ...]  # every directory, each after its parents


def site_packages(python: str) -> str:
    """Return the directory of packages in an environment for Python ``major.minor``."""
    return f"lib/python{python}/site-packages"


def own_python(env_dir: str, python: str) -> str:
    """Return the program of the Python that the bundle has brought."""
    return f"{env_dir}/{OWN_PYTHON}/bin/python{python}"


def own_directories(python: str) -> tuple[str, ...]:
    """Return the directories that every environment has."""
    state = (f"{STATE}/{name}" for name in ("site", *KEPT))
    return ("bin", site_packages(python), "project", "assets", *state)


def own_links(python: str) -> dict[str, str]:
    """Return the targets of an environment's own links, except the interpreter, by their paths."""
    return {
        "pkgs": site_packages(python),
        "lib64": "lib",  # the name on Fedora and its kin
        "bin/python3": "python",
        f"bin/python{python}": "python",
    }


def own_files(python: str) -> tuple[str, ...]:
    """Return the files of an environment that come from no layer."""
    site = site_packages(python)
    return (
        "pyvenv.cfg",
        "bin/python",
        *own_links(python),
        *(f"{site}/{HOOK}{name}.{ending}" for name in HOOKS for ending in ("pth", "py")),
        *(f"{site}/{HOOK}{name}.py" for name in HOOK_MODULES),
        f"{STATE}/manifest.json",
        f"{STATE}/listing",
    )


def merge(layers: Sequence[Layer], indexes: Sequence[Index], python: str) -> Merged:
    """Decide which layer writes which file; refuse a path that would be two kinds of thing."""
    files: dict[str, Entry] = {}
    links: dict[str, str] = {}
    entries = []
    for layer, index in zip(layers, indexes):
        entries.append(_add_files(files, layer, index))
        for path, target in index.links:
            if links.setdefault(path, target) != target:
                raise _make_clash(path, f"leads elsewhere in {layer.name}")
    folders = list_parents([*files, *links])
    own = {f"{STATE}/{name}" for name in KEPT} & folders
    folders |= list_parents(f"{path}/" for path in own_directories(python))
    own |= (folders | files.keys() | links.keys()).intersection(own_files(python))
    for paths, why in (
        (own, "belongs to the environment itself"),
        ((files.keys() | links.keys()) & folders, "is a directory, and something else"),
        (files.keys() & links.keys(), "is a file, and a link"),
    ):
        if paths:
            raise _make_clash(min(paths), why)
    check_links(links)
    return Merged(tuple(entries), links, tuple(sorted(folders)))


def is_document(path: str) -> bool:
    """Return whether a file is a text at the top that many wheels have: any of them will do."""
    return bool(_DOCUMENT.fullmatch(path))


def _add_files(files: dict[str, Entry], layer: Layer, index: Index) -> tuple[Entry, ...]:
    """Add a layer's files; return the new ones. Refuse one that differs, except a document."""
    new = []
    for entry in index.files:
        first = files.setdefault(entry.path, entry)
        if first is entry:
            new.append(entry)
        elif first.sha256 != entry.sha256 and not is_document(entry.path):
            raise _make_clash(entry.path, f"differs in {layer.name} {layer.version}".rstrip())
    return tuple(new)


def _make_clash(path: str, why: str) -> LayerError:
    return LayerError(f"the layers do not go together: {path} {why}")


# --- The list of everything in an environment: written when it is published, compared at each use

# It is the file ``.stager/listing``: the sha256 of what follows, a line ``{"bundle", "layers",
# "own"}`` with the bundle's id, the head of each layer with the times between which its files were
# written (nanoseconds by the file system's clock), and those of all other files; and for each
# directory one line ``[path, names, codes, links, layers]``: names with slashes between them, codes
# with commas, the targets of links by their names, and pairs of a layer's number and how many names
# are files of it, which come first and in this order. A file's code is twice its size, plus one
# where it can be executed; others are ``FOLDER``, ``LINK`` and ``OWN``, which each node writes.

PATH = f"{STATE}/listing"
INTERPRETER = ("pyvenv.cfg", "bin/python")  # differ between nodes; renewed if it moves
FOLDER, LINK, OWN = -1, -2, -3


class ListingError(ValueError):
    """The listing is missing or damaged."""


class Window(NamedTuple):
    """The times between which files were written, in nanoseconds by the file system's clock."""

    first: int
    last: int

    def around(self, other: Window) -> Window:
        """Return the window that includes both."""
        return Window(min(self.first, other.first), max(self.last, other.last))


class Listing(NamedTuple):
    """A listing that has been read, its digest checked."""

    heads: list[str]  # the digest of each layer's head
    layers: list[Window]  # when the files of each layer were written
    own: Window  # the same of all other files
    folders: Sequence[bytes]  # a line for each directory


class Folder(NamedTuple):
    """The content of one directory."""

    path: str
    names: dict[str, int]  # the code of each name; files of layers come first, in the layers' order
    links: dict[str, str]
    layers: list[list[int]]  # numbers of layers, each with the count of its files among the names

    def to_line(self) -> bytes:
        """Return its line in the listing."""
        codes = ",".join(map(str, self.names.values()))
        fields = [self.path, "/".join(self.names), codes, self.links, self.layers]
        return json.dumps(fields, separators=(",", ":")).encode()

    def map_layers(self) -> dict[str, int]:
        """Return the layer of each name that is a file of one."""
        numbers = chain.from_iterable(repeat(number, count) for number, count in self.layers)
        return dict(zip(self.names, numbers))

    def find_window(self, listing: Listing) -> Window | None:
        """Return when all of its files were written; None if some belong to other times."""
        windows = {listing.layers[number] for number, _ in self.layers}
        others = [*self.names.values()][sum(count for _, count in self.layers) :]
        if any(code >= 0 for code in others):
            windows.add(listing.own)
        return windows.pop() if len(windows) == 1 else None


def parse_folders(lines: Sequence[bytes]) -> Iterator[Folder]:
    """Read the lines of directories; those that are read together take half the time."""
    for path, names, codes, links, layers in json.loads(b"[%s]" % b",".join(lines)):
        coded = zip(names.split("/"), map(int, codes.split(","))) if names else ()
        yield Folder(path, dict(coded), links, layers)


def list_folders(
    entries: Sequence[Sequence[Entry]],
    links: Mapping[str, str],
    own: Mapping[str, bytes],
    directories: Sequence[str],
) -> list[Folder]:
    """Return the content of each directory."""
    folders = {path: Folder(path, {}, {}, []) for path in ("", *directories)}
    for number, layer in enumerate(entries):
        for path, files in groupby(layer, lambda entry: entry.path.rpartition("/")[0]):
            folder = folders[path]
            before = len(folder.names)
            name_start = len(path) + 1 if path else 0
            for entry in files:
                folder.names[entry.path[name_start:]] = 2 * entry.size + (entry.mode >> 6 & 1)
            folder.layers.append([number, len(folder.names) - before])
    others = {path: 2 * len(data) for path, data in own.items()}
    for paths, code in ((links, LINK), (directories, FOLDER), ((PATH, *INTERPRETER), OWN)):
        others.update(dict.fromkeys(paths, code))
    for path, code in others.items():
        parent, _, name = path.rpartition("/")
        folders[parent].names[name] = code
        if code == LINK:
            folders[parent].links[name] = links[path]
    return list(folders.values())


def write(
    env_dir: str,
    bundle_id: str,
    folders: Sequence[Folder],
    layers: Sequence[tuple[str, Window | None]],
    started: int,
) -> None:
    """Write the listing, the last file; a layer's window is None if just written."""
    with open(os.path.join(env_dir, PATH), "xb") as handle:
        # Files that were written before are not newer than this one, by any clock.
        own = Window(started, os.fstat(handle.fileno()).st_mtime_ns)
        written = [[head, *(window or own)] for head, window in layers]
        lines = [canonical_json({"bundle": bundle_id, "layers": written, "own": own})]
        lines += (folder.to_line() for folder in folders)
        body = b"\n".join(lines)
        handle.write(Digest.of(body).encode() + b"\n" + body)
        handle.flush()
        os.fsync(handle.fileno())


def layers_written(env_dir: str) -> dict[str, Window]:
    """Return when the files of each layer were written, by its head; empty without a listing."""
    with suppress(ListingError):
        listing = read(env_dir)
        return dict(zip(listing.heads, listing.layers))
    return {}


def read(env_dir: str) -> Listing:
    """Read a listing; ListingError if it is missing, damaged, or of another environment."""
    try:
        data = read_file(os.path.join(env_dir, PATH))
    except OSError as exc:
        raise ListingError(error_text(exc)) from exc
    digest, _, body = data.partition(b"\n")
    if Digest.of(body).encode() != digest:
        raise ListingError("it does not have the digest it begins with")
    head, *lines = body.split(b"\n")
    bundle_id, layers, own = map(json.loads(head).get, ("bundle", "layers", "own"))
    if bundle_id != os.path.basename(env_dir):
        raise ListingError(f"it is that of bundle {bundle_id[:12]}")
    windows = [Window(first, last) for _, first, last in layers]
    return Listing([head for head, _, _ in layers], windows, Window(*own), lines)
