"""Lines of any length through ``srun``, from many nodes at a time, without mixing.

``slurmstepd`` passes on what a task writes in messages of about a kilobyte, whole lines as long as
they fit (``_task_build_message`` in slurmstepd's io.c); longer lines of several nodes come out in
pieces, one in the middle of the other. So every line is cut here into frames that fit::

    node07 + first piece
    node07 . last piece
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 960
"""Bytes of one frame, its line end included."""


def split(source: str, line: str) -> Iterator[bytes]:
    """The frames of one line.

    Args:
        source: who sends it, without blanks, for example the node's name and the task's number.
        line: text without a line end.
    """
    head, data = source.encode(), line.encode()
    room = LONGEST - len(head) - 4
    last = max(0, len(data) - 1) // room
    for number in range(last + 1):
        more = b" . " if number == last else b" + "
        yield head + more + data[number * room : (number + 1) * room] + b"\n"


class Joiner:
    """Puts the frames of many sources together again."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._rest = b""
        self._pieces: dict[bytes, list[bytes]] = {}

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """Take what was read; gives (source, line) for each line that is now whole.

        What is not a frame (a message of Slurm's own, say) is given with an empty source.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            source, mark, piece = _parts(line)
            if not mark:
                yield "", line.decode(errors="replace")
                continue
            pieces = self._pieces.setdefault(source, [])
            pieces.append(piece)
            if mark == b".":
                del self._pieces[source]
                yield source.decode(errors="replace"), b"".join(pieces).decode(errors="replace")


def _parts(line: bytes) -> tuple[bytes, bytes, bytes]:
    source, _, rest = line.partition(b" ")
    if not source or rest[:2] not in (b"+ ", b". "):
        return b"", b"", line
    return source, rest[:1], rest[2:]
