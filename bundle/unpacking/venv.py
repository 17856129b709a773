"""A staged tree as a relocatable virtual environment (PEP 405), and what it keeps about itself."""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Sequence

from .. import delta, imports, patches
from ..manifest import Manifest
from ..problem import NodeError, Problem
from .merge import HOOK, STATE, site_packages


def is_ready(path: str, python: str) -> bool:
    """Whether a published environment is there; its interpreter link is renewed if it moved."""
    for name in ("pyvenv.cfg", "bin", os.path.join(STATE, "manifest.json")):
        if not os.path.exists(os.path.join(path, name)):
            return False  # never made, or cleared away in part, as cleaners of /tmp do
    link = os.path.join(path, "bin", "python")
    if os.path.realpath(link) != os.path.realpath(python):
        _interpreter(path, python)
    return True


def finish(
    staging: str,
    manifest: Manifest,
    python: str,
    heads: Sequence[bytes],
    wheel: bytes | None,
) -> None:
    """Make a virtual environment of the tree (PEP 405), and note what it was made from."""
    site = site_packages(manifest.requires.python)
    os.symlink(site, os.path.join(staging, "pkgs"))
    os.symlink("lib", os.path.join(staging, "lib64"))  # the name on Fedora and its kin
    _interpreter(staging, python)
    for name in ("python3", f"python{manifest.requires.python}"):
        os.symlink("python", os.path.join(staging, "bin", name))
    for path, content in hooks(manifest.requires.python).items():
        _write(os.path.join(staging, path), content)
    for layer, head in zip(manifest.layers, heads):
        _write(os.path.join(staging, STATE, "layers", layer.id), head)
    if manifest.decompressor is not None and wheel is not None:
        _write(delta.decompressor_path(staging, manifest.decompressor), wheel)
    # The last file of all: its time is the environment's, see bundle.delta.
    _write(os.path.join(staging, STATE, "manifest.json"), manifest.to_bytes())


def hooks(python: str) -> dict[str, bytes]:
    """What every interpreter of an environment runs when it starts: paths there, and contents.

    Args:
        python: ``major.minor``.
    """
    start = f"{site_packages(python)}/{HOOK}"
    contents = {}
    for name, line in (("imports", imports.PTH_LINE), ("patches", patches.PTH_LINE)):
        contents[f"{start}{name}.pth"] = line.encode() + b"\n"
        contents[f"{start}{name}.py"] = source_of(name)
    return contents


def _interpreter(path: str, python: str) -> None:
    """Point the environment at an interpreter of this node, replacing what was there by renames."""
    config = (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    )
    mark = f".{os.getpid()}-{time.monotonic_ns()}"
    # The link comes last: where it is right, all is.
    _write(os.path.join(path, "pyvenv.cfg" + mark), config.encode())
    os.rename(os.path.join(path, "pyvenv.cfg" + mark), os.path.join(path, "pyvenv.cfg"))
    link = os.path.join(path, "bin", "python")
    os.symlink(python, link + mark)
    os.rename(link + mark, link)


def source_of(name: str) -> bytes:
    """The source of a module, from the directory or the zip that all of this was loaded from.

    Args:
        name: as it is below the top of the far side: ``wrapper``, ``talking.bootstrap``.

    Raises:
        NodeError: there is none.
    """
    top = __name__.partition(".")[0]
    data = pkgutil.get_data(top, f"{name.replace('.', '/')}.py")
    if data is None:
        raise NodeError(Problem("the node program is incomplete", name, "no source", "build again"))
    return data


def _write(path: str, data: bytes) -> None:
    # "x": never through a link, and never into a file that older environments share.
    with open(path, "xb") as handle:
        handle.write(data)
