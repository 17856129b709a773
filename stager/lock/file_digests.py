"""Completing what a resolver answered: every file gets its digest and, where possible, its size.

An index page need not give either. Sizes come from the cheapest place that has them: the disk, the
offline root, a HEAD request; digests are never taken from anything but the bytes or the index.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..core.digest_cache import DigestCache
from ..core.errors import ResolveError
from ..core.store import Store, sha256_of
from ..core.values import LockedFile
from .pip import Pip
from .pylock import locked_files
from .resolver import ResolvedFile

HEAD_SECONDS = 10.0
HEADS_AT_ONCE = 8
ANSWER_SECONDS = 3.0

SizeOf = Callable[[str], "int | None"]


def measure(
    found: Sequence[ResolvedFile], *, store: Store, pip: Pip, size_of: SizeOf | None = None
) -> tuple[LockedFile, ...]:
    """Turn a resolver's answer into locked files, sorted by name.

    Args:
        found: one file for each package.
        store: where files lie already, and where those go that have to be downloaded for it.
        pip: downloads files of which neither digest nor size can be learned otherwise.
        size_of: the length in bytes of what a URL names, None where the server does not say.

    Raises:
        ResolveError: a file whose digest cannot be learned.
    """
    digest_cache = DigestCache(store)
    files = [_from_disk(file, store, digest_cache) for file in found]
    asked = [file.url for file in files if file.url and file.size is None]
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        sizes = dict(zip(asked, pool.map(size_of or content_length, asked), strict=True))
    files = [replace(f, size=sizes[f.url]) if f.url in sizes else f for f in files]
    files = [
        _download(file, store, pip) if file.url and None in (file.size, file.sha256) else file
        for file in files
    ]
    digest_cache.save()
    return locked_files(files, source="the resolver's answer")


def content_length(url: str) -> int | None:
    """The length in bytes that a server gives for a URL; honours the usual proxy variables."""
    try:
        length = _head(url, HEAD_SECONDS).get("Content-Length", "")
    except (OSError, ValueError):  # URLError is an OSError; a private index may refuse us
        return None
    return int(length) if length.isdigit() else None


def index_answers(url: str) -> bool:
    """Whether a package index answers at all, within three seconds; honours proxy variables."""
    try:
        _head(url, ANSWER_SECONDS)
    except (OSError, ValueError):
        return False
    return True


def _head(url: str, seconds: float) -> Mapping[str, str]:
    """The headers of a URL's answer; OSError or ValueError where there is none."""
    import urllib.request  # here: a tenth of a second that most commands do not need

    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not a web address: {url}")
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310
    with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
        return dict(answer.headers.items())


def _from_disk(file: ResolvedFile, store: Store, digest_cache: DigestCache) -> ResolvedFile:
    """Fill in what a file on this machine tells."""
    if file.path:
        try:
            size = file.path.stat().st_size
        except OSError as exc:
            raise ResolveError(f"cannot read {file.path}: {exc.strerror or exc}") from exc
        return replace(file, size=size, sha256=file.sha256 or sha256_of(file.path))
    kept = store.wheels / file.filename
    digest = digest_cache.digest(kept)
    if digest and digest == file.sha256:
        return replace(file, size=kept.stat().st_size)
    return file


def _download(file: ResolvedFile, store: Store, pip: Pip) -> ResolvedFile:
    """Get a file into the store; one without a digest is believed on its first arrival."""
    if not file.filename.endswith(".whl"):
        return file  # pip would build it to learn its metadata
    folder = pip.scratch / "measured"
    name, version = file.identity
    digest = f" --hash=sha256:{file.sha256}" if file.sha256 else ""
    for line in (f"{name} @ {file.url}{digest}", f"{name}=={version}{digest}"):
        if pip.download([line], folder).returncode == 0:
            break
    arrived = folder / file.filename
    if not arrived.is_file():
        return file
    found = replace(file, size=arrived.stat().st_size, sha256=file.sha256 or sha256_of(arrived))
    with store.publishing(store.wheels / file.filename) as partial:
        shutil.copyfile(arrived, partial)
    return found
