"""The folder of a mirror: wheels, their digests, and ``simple``, the index.

``SHA256SUMS`` says what each wheel must be; ``sha256sum -c`` can check a copy with it. Each file
appears by a rename, the wheels first and the index last: whatever interrupts that, the index names
only what is there. No other file is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from bundle.protocol.digest import Digest

from ..core.errors import SpaceError, StagerError, WheelError
from ..core.files import bytes_of, opened, replacing, text_of
from ..core.store import CHUNK
from ..core.values import Wheel
from .simple_index import pages
from .wheel_file import ListedWheel

MARK = "stager-mirror.txt"
SUMS = "SHA256SUMS"
INDEX = "simple"
_METADATA = ".metadata"
"""The ending of a wheel's METADATA file, after the wheel's name (PEP 658)."""
_TEXT = f"""\
`stager mirror` keeps this folder: wheels, and an index of them. It may be copied as a whole.

    sha256sum -c {SUMS}
    pip install --index-url file:///PATH/OF/THIS/FOLDER/{INDEX} NAME
    uv pip install --default-index file:///PATH/OF/THIS/FOLDER/{INDEX} NAME
"""
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.part")
"""Names of files that a killed process has left unfinished; see ``replacing``."""
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([^/]+)")


class MirrorFolder:
    """The folder of a mirror, which this process holds alone; see :func:`held`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def index(self) -> Path:
        """Return the folder of the index."""
        return self.root / INDEX

    def wheels(self) -> list[Path]:
        """Return the wheels that are there."""
        return sorted(self.root.glob("*.whl"))

    def recorded(self) -> dict[str, Digest]:
        """Return what each wheel must be, by file name.

        Raises:
            StagerError: the record is damaged.
        """
        path = self.root / SUMS
        try:
            lines = text_of(path).splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as exc:
            raise _damaged_record(path, str(exc)) from exc
        found = [(number, _SUM.fullmatch(line)) for number, line in enumerate(lines, 1)]
        bad = [f"line {number}" for number, match in found if match is None]
        if bad:
            raise _damaged_record(path, ", ".join(bad))
        return {match[2]: Digest(match[1]) for _, match in found if match is not None}

    def record(self, digests: Mapping[str, Digest]) -> None:
        """Write what each wheel must be."""
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
        self._write(self.root / SUMS, "".join(lines).encode())

    def put(self, wheel: Wheel) -> None:
        """Copy a wheel into the folder, in place of one that is there.

        Raises:
            WheelError: what is copied is not what it must be.
            StagerError: it cannot be written.
        """
        place = self.root / wheel.path.name
        state = hashlib.sha256()
        with writing(place), replacing(place) as target, opened(wheel.path) as source:
            while chunk := source.read(CHUNK):
                state.update(chunk)
                target.write(chunk)
            if state.hexdigest() != wheel.sha256:
                raise WheelError(
                    f"{wheel.path} is damaged, or was changed just now",
                    hint="remove it, and run the command again",
                )

    def publish(self, wheels: Collection[ListedWheel]) -> None:
        """Write the index of these wheels, and remove from it what is no longer there.

        Raises:
            StagerError: it cannot be written.
        """
        self.record({wheel.filename: wheel.sha256 for wheel in wheels})
        metadata = {f"{wheel.filename}{_METADATA}": wheel.metadata for wheel in wheels}
        for name, data in metadata.items():
            self._write(self.root / name, data)
        written = dict(pages(wheels))
        for path, text in written.items():
            self._write(self.index / path, text.encode())
        with writing(self.index):
            projects = [page.parent for page in self.index.glob("*/index.json")]
            _remove(path for path in projects if f"{path.name}/index.json" not in written)
            others = self.root.glob(f"*.whl{_METADATA}")
            _remove(path for path in others if path.name not in metadata)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file unless it has this content already: a USB stick is slow, and wears out."""
        with writing(path):
            with contextlib.suppress(FileNotFoundError):
                if bytes_of(path) == data:
                    return
            path.parent.mkdir(exist_ok=True, parents=True)
            with replacing(path) as target:
                target.write(data)


@contextlib.contextmanager
def held(root: Path, waiting: Callable[[], None]) -> Iterator[MirrorFolder]:
    """Make the folder if need be, and hold it alone until the block ends.

    Raises:
        StagerError: it holds something else, or cannot be written.
    """
    refuse_other(root)
    handle = -1
    try:
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(root / MARK, flags, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            _begin(root, handle)
        yield MirrorFolder(root)
    finally:
        if handle >= 0:
            os.close(handle)  # never removed: a lock on a removed file keeps nobody out


def refuse_other(root: Path) -> None:
    """Refuse a directory that is used for something else.

    Raises:
        StagerError: it is one.
    """
    try:
        names = set(os.listdir(root))  # noqa: PTH208 - the names alone
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StagerError(
            f"{root} cannot be used for a mirror: {exc.strerror or exc}",
            hint="name a directory that can be read and written, or a new one",
        ) from exc
    if names and MARK not in names:
        raise StagerError(
            f"{root} is not a mirror and is not empty: nothing was written there",
            hint=f"name a new or an empty directory; a mirror has a file named {MARK}",
        )


def _begin(root: Path, handle: int) -> None:
    _remove(path for path in root.rglob(".*.part") if _PARTIAL.fullmatch(path.name))
    if os.fstat(handle).st_size:
        return
    with replacing(root / ".gitignore") as ignored:  # a project around it does not ship it
        ignored.write(b"*\n")
    os.write(handle, _TEXT.encode())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write below a mirror into an error that says what to do.

    Raises:
        StagerError: something could not be written.
    """
    try:
        yield
    except OSError as exc:
        place = exc.filename or path
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no space left while writing {path}",
                hint="free some space there and run the command again: what is complete stays",
            ) from exc
        raise StagerError(
            f"the mirror cannot be written: {place}: {exc.strerror or exc}",
            hint="make the directory writable, or name another one; to install from a mirror, "
            "it need not be writable",
        ) from exc


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _damaged_record(path: Path, what: str) -> StagerError:
    return StagerError(
        f"{path} is damaged: {what}",
        hint="take it from another copy of the mirror; or remove it, and the wheels that are "
        "there are taken to be sound",
    )
