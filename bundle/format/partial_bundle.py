"""A file with only some members of a bundle: those that the nodes do not have."""

from __future__ import annotations

import os
from collections.abc import Collection

from ..protocol.problem import NodeError, ProblemCode
from ..system import files
from .archive import END, BundleFile
from .manifest import member_header, padding

_CHUNK = 8 << 20


def write_excerpt(bundle: BundleFile, members: Collection[str], path: str) -> int:
    """Copy some members, in the bundle's order and as a tar of its own.

    Args:
        bundle: the source.
        members: their names.
        path: a new file.

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
