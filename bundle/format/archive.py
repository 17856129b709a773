"""A bundle that is read: nothing in it is trusted before it is compared with the manifest."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hashlib
import mmap
import os
import stat
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from .layer import Index, LayerError, decode_head, read_origin
from .manifest import (
    BLOCK,
    PART_LIMIT,
    FormatError,
    Layer,
    Manifest,
    ManifestError,
    Part,
    StoredMember,
    count_padding,
    member_header,
    parse,
)
from .zstd import Decompress

# --- A file that is read while it is still being transferred -------------------------------------

# A relay counts what has arrived. ``sbcast`` writes its target in order; should
# some version set the full length at once, the digests show it: bytes that do not fit yet are read
# again until the transfer is over.

_RUNNING, _DONE, _FAILED = range(3)
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.004, 0.03  # between two looks: longer if nothing comes
_SLOTS = 256  # processes whose waiting times are kept apart; more of them share a slot


class Arrival:
    """The progress of a transfer; shared with the processes that are forked later."""

    def __init__(self, prefix: memoryview | None = None, *, is_over: bool = False) -> None:
        """Share ``prefix``, the gapless bytes so far, with the writer; None if it is in order."""
        self._prefix = prefix
        self._state = mmap.mmap(-1, 1)
        self._state[0] = _DONE if is_over else _RUNNING
        self._waits = memoryview(mmap.mmap(-1, _SLOTS * 8)).cast("d")

    def end(self, *, whole: bool) -> None:
        """Note that the transfer is over, with all of the file or not."""
        self._state[0] = _DONE if whole else _FAILED

    @property
    def has_failed(self) -> bool:
        """True if the transfer has failed."""
        return self._state[0] == _FAILED

    def may_grow(self, path: str) -> bool:
        """Return True if more bytes may come."""
        if self.has_failed:
            raise NodeError(Problem(ProblemCode.BUNDLE_CUT_OFF, path))
        return self._state[0] == _RUNNING

    def wait(self, handle: int, end: int, path: str) -> None:
        """Wait until the open file has ``end`` bytes, or no more will come."""
        seconds = _PAUSE_SECONDS
        while end > (self._prefix[0] if self._prefix else os.fstat(handle).st_size):
            if not self.may_grow(path):
                break
            self.pause(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def pause(self, seconds: float = _PAUSE_SECONDS) -> None:
        """Wait a moment for more bytes."""
        started = time.monotonic()
        time.sleep(seconds)
        self._waits[os.getpid() % _SLOTS] += time.monotonic() - started

    @property
    def average_wait_seconds(self) -> float:
        """Average of the seconds that processes have waited, without those that never did."""
        waits = list(filter(None, self._waits))
        return sum(waits) / max(1, len(waits))


END = bytes(2 * BLOCK)  # the end of every tar, and so of a bundle
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe would wait for a writer


class Excerpt(NamedTuple):
    """The content of a file with only some members of a bundle, in the bundle's order."""

    manifest: bytes  # the bundle's manifest, which is not in the file
    members: frozenset[str]


class BundleFile:
    """An open bundle whose frame, manifest and length have been checked."""

    def __init__(
        self,
        path: str,
        expected: str | None = None,
        excerpt: Excerpt | None = None,
        arrival: Arrival | None = None,
    ) -> None:
        """Open a bundle and check all but the content of its parts and layers.

        While it is still being sent, reading waits, and :meth:`check_frame` is the caller's.
        """
        self.path = path
        self._arrival = arrival or Arrival(is_over=True)
        self._layers: dict[str, int] = {}  # the open files of a thin one's layers, by path
        self._starts, self._sources = [0], [("", 0)]
        """For each stretch of the bundle its beginning, and the layer that has it (else this file),
        with how much further it is in the bundle than there."""
        while not self._open_checked(expected, excerpt, is_arriving=arrival is not None):
            self._arrival.pause()

    def _open_checked(
        self, expected: str | None, excerpt: Excerpt | None, *, is_arriving: bool
    ) -> bool:
        """Open and check the file; return False if another one may still come into its place."""
        more_may_come = self._arrival.may_grow(self.path)
        try:
            self._handle = os.open(self.path, _FLAGS)
        except OSError as exc:
            if more_may_come and isinstance(exc, FileNotFoundError):
                return False
            raise self._problem(ProblemCode.BUNDLE_UNREADABLE, why=files.error_text(exc)) from exc
        # An open bundle is not cleaned away; not every file system has locks.
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_SH)
        try:
            self._begin(excerpt)
            if not is_arriving:
                self._use_stored_layers(excerpt)
                self.check_frame()
            if expected not in (None, self.manifest.id):
                ids = {"id": self.manifest.id[:12], "expected": str(expected)[:12]}
                raise self._problem(ProblemCode.ANOTHER_BUNDLE, **ids)
        except ManifestError as exc:
            self.close()
            if more_may_come:
                return False
            is_other = isinstance(exc, FormatError)
            code = ProblemCode.BUNDLE_OF_OTHER_VERSION if is_other else ProblemCode.BUNDLE_DAMAGED
            raise self._problem(code, why=str(exc)) from exc
        except BaseException:
            self.close()
            raise
        return True

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and those of the layers."""
        os.close(self._handle)
        while self._layers:
            os.close(self._layers.popitem()[1])

    @property
    def is_arriving(self) -> bool:
        """True while more bytes of it may come."""
        return self._arrival.may_grow(self.path)

    def offset(self, member: str) -> int:
        """Return where the content of a member begins in the file."""
        return self._offsets[member]

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes from a place in the file; several processes may read at the same time."""
        try:
            self._arrival.wait(self._handle, offset + size, self.path)
            data = b""
            while len(data) < size:
                handle, place, length = self.locate(offset + len(data), size - len(data))
                more = os.pread(handle, length, place)
                if not more:
                    raise self._make_damage_error("it ends too early")
                data = data + more if data else more
        except OSError as exc:
            raise self._make_damage_error(f"it cannot be read: {exc.strerror or exc}") from exc
        return data

    def locate(self, offset: int, size: int) -> tuple[int, int, int]:
        """Return the open file that has bytes of the bundle, their offset in it, and how many."""
        number = bisect.bisect_right(self._starts, offset) - 1
        path, shift = self._sources[number]
        if number + 1 < len(self._starts):
            size = min(size, self._starts[number + 1] - offset)
        if not path:
            return self._handle, offset - shift, size
        if path not in self._layers:
            self._layers[path] = os.open(path, _FLAGS)
        return self._layers[path], offset - shift, size

    def holds(self, member: str) -> bool:
        """Return True if a member of the bundle is in this file."""
        return member in self._offsets

    def read_part(self, part: Part) -> bytes:
        """Return a raw member, its digest checked."""
        why = f"{part.name} does not have the digest in the manifest"
        return self._read_checked_bytes(self._offsets[part.name], part.size, part.sha256, why)

    def head(self, layer: Layer) -> bytes:
        """Return the bytes of a layer's head, which holds its index, their digest checked."""
        why = f"the index of {layer.name} does not have the promised digest"
        return self._read_checked_bytes(
            self._offsets[layer.head_member], layer.head_size, layer.head, why
        )

    def index(
        self, layer: Layer, head: bytes, decompress: Decompress, *, checked: bool = False
    ) -> Index:
        """Return the checked index of a layer, from its head."""
        with self.turn_into_damage(LayerError):
            origin = read_origin(head)
            if not origin.describes(layer):
                source = f"{origin.kind} {origin.name} {origin.version}".strip()
                raise LayerError(
                    f"the layer of {layer.name} {layer.version} was made from {source},"
                    " or with other options"
                )
            index = decode_head(head, lambda data: decompress(data, -1), checked=checked)
        size = layer.head_size + sum(frame.size for frame in index.frames)
        promised = (layer.size, layer.unpacked_size, layer.files)
        if (size, index.unpacked_size, len(index.files)) != promised:
            raise self._make_damage_error(f"{layer.name} does not hold as much as promised")
        return index

    def frame(self, offset: int, size: int, sha256: str) -> bytes:
        """Return the compressed bytes of one frame, their digest checked."""
        why = f"the {size} bytes at {offset} do not have the promised digest"
        return self._read_checked_bytes(offset, size, sha256, why)

    @contextlib.contextmanager
    def turn_into_damage(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn these exceptions into an error about a damaged bundle."""
        try:
            yield
        except kinds as exc:
            raise self._make_damage_error(str(exc)) from exc

    def check_frame(self) -> None:
        """Check every header, every padding byte, the end of the tar and the file's length."""
        end = 0
        for name, length in self._members:
            start = self._offsets[name]
            if self.read(start - BLOCK, BLOCK) != member_header(name, length):
                raise self._make_damage_error(f"the tar header of {name} is not what it must be")
            fill = count_padding(length)
            end = start + length + fill
            if self.read(end - fill, fill) != bytes(fill):
                raise self._make_damage_error(f"the padding behind {name} is not empty")
        self._arrival.wait(self._handle, end + len(END), self.path)
        total = os.fstat(self._handle).st_size
        if not self.is_thin and total != end + len(END):
            raise self._make_damage_error(f"it has {total} bytes, not {end + len(END)}")
        if self.read(end, len(END)) != END:
            raise self._make_damage_error("the end mark of the tar is damaged")

    def _begin(self, excerpt: Excerpt | None) -> None:
        if not stat.S_ISREG(os.fstat(self._handle).st_mode):
            raise ManifestError("it is not a file")
        self.manifest = self._read_manifest() if excerpt is None else parse(excerpt.manifest)
        self._members = self.manifest.members()
        if excerpt is not None:
            self._members = [part for part in self._members if part[0] in excerpt.members]
        self._offsets: dict[str, int] = {}
        position = 0
        for name, size in self._members:
            self._offsets[name] = position + BLOCK
            position += BLOCK + size + count_padding(size)
        for name, size in self._members[:1]:
            if self.read(0, BLOCK) != member_header(name, size):
                raise ManifestError(f"the tar header of {name} is not what it must be")

    @property
    def is_thin(self) -> bool:
        """True if some of its members are not in its own file."""
        return len(self._starts) > 1

    def _use_stored_layers(self, excerpt: Excerpt | None) -> None:
        size = os.fstat(self._handle).st_size
        if excerpt is not None or size != self.manifest.thin_size or size == self.manifest.size:
            return
        stored = {member.name: member for member in self.manifest.external_members}
        cut = sum(BLOCK + member.size + count_padding(member.size) for member in stored.values())
        folder, place, behind = layers_folder(self.path), 0, self.manifest.size - cut
        parts: list[tuple[int, str, int]] = []
        for name, size in self._members:
            fill, member = count_padding(size), stored.get(name)
            if member is None:
                parts.append((BLOCK + size + fill, "", place))
                place += BLOCK + size + fill
            else:
                path = self._find_stored_layer(folder, member)
                parts += (BLOCK, "", behind), (size, path, member.start), (fill, "", behind + BLOCK)
                behind += BLOCK + fill
        parts.append((len(END), "", place))
        self._starts = [0, *accumulate(length for length, _, _ in parts[:-1])]
        self._sources = [
            (path, begin - start) for begin, (_, path, start) in zip(self._starts, parts)
        ]

    def _find_stored_layer(self, folder: str, member: StoredMember) -> str:
        path, expected = os.path.join(folder, member.file), member.start + member.size
        try:
            found = os.stat(path).st_size
        except OSError as exc:
            why = files.error_text(exc)
        else:
            if found == expected:
                return path
            why = f"it has {found} bytes, not {expected}"
        raise self._problem(ProblemCode.STORED_LAYER_UNUSABLE, layer=path, why=why)

    def _read_manifest(self) -> Manifest:
        self._arrival.wait(self._handle, BLOCK, self.path)
        header = os.pread(self._handle, BLOCK, 0)
        size = 0
        with contextlib.suppress(ValueError):
            size = int(header[124:135], 8)
        self._arrival.wait(self._handle, BLOCK + min(size, PART_LIMIT), self.path)
        if not 0 < size <= min(PART_LIMIT, os.fstat(self._handle).st_size - BLOCK):
            raise ManifestError("it does not begin with manifest.json")
        return parse(self.read(BLOCK, size))

    def _read_checked_bytes(self, offset: int, size: int, sha256: str, why: str) -> bytes:
        while True:
            more_may_come = self._arrival.may_grow(self.path)
            data = self.read(offset, size)
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            if not more_may_come:
                path, _ = self._sources[bisect.bisect_right(self._starts, offset) - 1]
                if path:
                    raise self._problem(ProblemCode.STORED_LAYER_UNUSABLE, layer=path, why=why)
                raise self._make_damage_error(why)
            self._arrival.pause()

    def _make_damage_error(self, why: str) -> NodeError:
        return self._problem(ProblemCode.BUNDLE_DAMAGED, why=why)

    def _problem(self, code: ProblemCode, **values: str) -> NodeError:
        return NodeError(Problem(code, self.path, values))


def layers_folder(path: str) -> str:
    """Return the directory with the layers of a thin bundle."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(path))), "layers")


def compute_file_digest(path: str) -> str:
    """Return the SHA-256 of a whole file, as hexadecimal digits."""
    try:
        with open(path, "rb") as handle:
            return files.compute_digest(handle.fileno())
    except OSError as exc:
        values = {"why": files.error_text(exc)}
        raise NodeError(Problem(ProblemCode.BUNDLE_DISK_FAULT, path, values)) from exc
