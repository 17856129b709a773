"""A staged tree as a relocatable virtual environment (PEP 405), with its own files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..format.manifest import Manifest
from ..system.own_program import source_of
from . import imports, listing, patches
from .damage import MANIFEST
from .interpreter_link import pyvenv_cfg
from .listing import Window
from .merge import HOOK, HOOK_MODULES, STATE, Merged, site_packages


def renew(path: str, python: str) -> None:
    """Point a published environment at an interpreter, if it uses another one."""
    if os.path.realpath(os.path.join(path, "bin", "python")) != os.path.realpath(python):
        _interpreter(path, python)


@dataclass(frozen=True)
class EnvironmentOrigin:
    """The sources of an environment, and their times."""

    heads: Sequence[bytes]
    """The head of each layer."""
    wheel: bytes | None
    """The decompressor, if not this Python's own."""
    linked: Mapping[str, Window]
    """The times at which the files of linked layers were written, by the layers' heads."""
    started: int
    """The time of the first new file, in nanoseconds by the file system's clock."""


def finish(
    staging: str, manifest: Manifest, python: str, merged: Merged, origin: EnvironmentOrigin
) -> None:
    """Make a virtual environment of the tree (PEP 405), and record its sources."""
    version = manifest.requires.python
    links = own_links(version)
    for path, target in links.items():
        os.symlink(target, os.path.join(staging, path))
    _interpreter(staging, python)
    own = {**hooks(version), MANIFEST: manifest.to_bytes()}
    for layer, head in zip(manifest.layers, origin.heads):
        own[f"{STATE}/layers/{layer.id}"] = head
    if manifest.decompressor is not None and origin.wheel is not None:
        own[f"{STATE}/decompressor/{manifest.decompressor.name}"] = origin.wheel
    for path, data in own.items():
        _write(os.path.join(staging, path), data)
    _sync(os.path.join(staging, MANIFEST))
    links = {**merged.links, **links}
    folders = listing.contents(merged.entries, links, own, merged.directories)
    layers = [(layer.head, origin.linked.get(layer.head)) for layer in manifest.layers]
    # Last of all, as its time is the environment's.
    listing.write(staging, manifest.id, folders, layers, origin.started)


def own_links(python: str) -> dict[str, str]:
    """Return the targets of an environment's own links, except the interpreter, by their paths."""
    return {
        "pkgs": site_packages(python),
        "lib64": "lib",  # the name on Fedora and its kin
        "bin/python3": "python",
        f"bin/python{python}": "python",
    }


def hooks(python: str) -> dict[str, bytes]:
    """Return the files that every interpreter of an environment runs at start, by their paths."""
    start = f"{site_packages(python)}/{HOOK}"
    contents = {}
    for name, line in (("imports", imports.PTH_LINE), ("patches", patches.PTH_LINE)):
        contents[f"{start}{name}.pth"] = line.encode() + b"\n"
        contents[f"{start}{name}.py"] = source_of(f"environment.{name}")
    for name in HOOK_MODULES:
        contents[f"{start}{name}.py"] = source_of(f"environment.{name}")
    return contents


def _interpreter(path: str, python: str) -> None:
    """Point the environment at an interpreter of this node, by renames."""
    mark = f".{os.getpid()}-{time.monotonic_ns()}"
    # The link comes last: if it is right, the rest is, too.
    _write(os.path.join(path, "pyvenv.cfg" + mark), pyvenv_cfg(python))
    os.rename(os.path.join(path, "pyvenv.cfg" + mark), os.path.join(path, "pyvenv.cfg"))
    link = os.path.join(path, "bin", "python")
    os.symlink(python, link + mark)
    os.rename(link + mark, link)


def _sync(path: str) -> None:
    """Fsync a file with the journal (some ms); after a crash, the listing shows missing files."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: str, data: bytes) -> None:
    # "x": never through a link, and never into a file that older environments share.
    with open(path, "xb") as handle:
        handle.write(data)
