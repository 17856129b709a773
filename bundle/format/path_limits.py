"""Limits of paths on nodes: checked where layers are made, and where they are unpacked."""

from __future__ import annotations

PATH_LIMIT = 3584
"""Bytes of a path in an environment. Linux takes 4,095 in all (path_resolution(7)); the rest is for
the node root."""
NAME_LIMIT = 255
"""Bytes of one name, on every file system that nodes have."""
DEPTH_LIMIT = 256
"""Names in a path; tools that walk trees by recursion end a few hundred further down."""
_SHOWN = 300
"""Characters of a path that a message shows."""


def excess(path: str) -> str:
    """Return the respect in which a path is too long for some node; empty if it fits."""
    data = path.encode("utf-8", "replace")
    longest_name = max(map(len, data.split(b"/")))
    depth = data.count(b"/") + 1
    if longest_name > NAME_LIMIT:
        return f"a name of {longest_name} bytes, more than {NAME_LIMIT}"
    if depth > DEPTH_LIMIT:
        return f"a path of {depth} levels, more than {DEPTH_LIMIT}"
    if len(data) > PATH_LIMIT:
        return f"a path of {len(data)} bytes, more than {PATH_LIMIT}"
    return ""


def abridged(path: str) -> str:
    """Return a path as a message shows it, without the middle of a long one."""
    if len(path) <= _SHOWN:
        return path
    return f"{path[:60]}...{path[-60:]}"


def any_excess(joined: str) -> bool:
    """Return True if any of several paths, one a line, may exceed a limit of a node."""
    lines = joined.encode("utf-8", "replace").split(b"\n")
    longest = max(map(len, lines))
    if longest > PATH_LIMIT:
        return True
    if max(line.count(b"/") for line in lines) > DEPTH_LIMIT:
        return True
    if longest <= NAME_LIMIT:
        return False
    return any(max(map(len, line.split(b"/"))) > NAME_LIMIT for line in lines)
