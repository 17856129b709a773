"""A file with only some members of a bundle, which the nodes do not have, or with all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection

from ..protocol.problem import NodeError, ProblemCode
from ..system import files
from .archive import END, BundleFile
from .manifest import member_header, padding

_CHUNK = 8 << 20


def digest_of_all(bundle: BundleFile) -> str:
    """Return the SHA-256 of a bundle as one file, as hexadecimal digits.

    Raises:
        NodeError: it cannot be read.
    """
    state, size = hashlib.sha256(), bundle.manifest.size
    for offset in range(0, size, _CHUNK):
        state.update(bundle.read(offset, min(_CHUNK, size - offset)))
    return state.hexdigest()


def write_excerpt(bundle: BundleFile, members: Collection[str], path: str) -> int:
    """Copy some members, in the bundle's order and as a tar of its own.

    Returns:
        Its length in bytes.

    Raises:
        NodeError: the file cannot be written, or the bundle cannot be read.
    """
    try:
        with open(path, "xb") as out:
            for name, size in bundle.manifest.members():
                if name not in members:
                    continue
                out.write(member_header(name, size))
                start = bundle.offset(name)
                for done in range(0, size, _CHUNK):
                    out.write(bundle.read(start + done, min(_CHUNK, size - done)))
                out.write(bytes(padding(size)))
            out.write(END)
            return out.tell()
    except OSError as exc:
        full, unwritable = ProblemCode.EXCERPT_DISK_FULL, ProblemCode.EXCERPT_UNWRITABLE
        folder = os.path.dirname(path)
        raise NodeError(files.disk_problem(exc, folder, full, unwritable)) from exc
