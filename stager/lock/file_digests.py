"""Digests and sizes of the files that a resolver chose.

An index page need not give either. Sizes come from the cheapest place that has them: the disk, the
offline root, a HEAD request; digests are only ever taken from the bytes or from the index.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..core.errors import ResolveError
from ..core.store import DigestCache, Store, sha256_of
from ..core.values import LockedFile
from .pip import Pip
from .pylock import locked_files
from .resolver import ResolvedFile

HEAD_SECONDS = 10.0
HEADS_AT_ONCE = 8
ANSWER_SECONDS = 3.0

SizeOf = Callable[[str], "int | None"]


def measure(
    resolved: Sequence[ResolvedFile], *, store: Store, pip: Pip, size_of: SizeOf | None = None
) -> tuple[LockedFile, ...]:
    """Turn a resolver's answer into locked files, sorted by name.

    Raises:
        ResolveError: a file whose digest cannot be learned.
    """
    digest_cache = DigestCache(store)
    files = [_from_disk(file, store, digest_cache) for file in resolved]
    files = _with_remote_sizes(files, size_of or content_length)
    for number, file in enumerate(files):
        if file.url and None in (file.size, file.sha256):
            files[number] = _download(file, store, pip)
    digest_cache.save()
    return locked_files(files, source="the resolver's answer")


def _with_remote_sizes(files: Sequence[ResolvedFile], size_of: SizeOf) -> list[ResolvedFile]:
    urls = [file.url for file in files if file.url and file.size is None]
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        sizes: dict[str | None, int | None] = dict(zip(urls, pool.map(size_of, urls), strict=True))
    return [replace(file, size=sizes.get(file.url, file.size)) for file in files]


def content_length(url: str) -> int | None:
    """Return the length in bytes a server gives for a URL; honours the usual proxy variables."""
    try:
        length = _head(url, HEAD_SECONDS).get("Content-Length", "")
    except (OSError, ValueError):  # URLError is an OSError; a private index may refuse us
        return None
    if not length.isdigit():
        return None
    return int(length)


def index_answers(url: str) -> bool:
    """Return whether a package index answers within three seconds; honours proxy variables."""
    try:
        _head(url, ANSWER_SECONDS)
    except (OSError, ValueError):
        return False
    return True


def _head(url: str, seconds: float) -> Mapping[str, str]:
    import urllib.request  # here: a tenth of a second that most commands do not need

    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not a web address: {url}")
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310
    with urllib.request.urlopen(request, timeout=seconds) as response:  # noqa: S310
        return dict(response.headers.items())


def _from_disk(file: ResolvedFile, store: Store, digest_cache: DigestCache) -> ResolvedFile:
    if file.path:
        try:
            size = file.path.stat().st_size
        except OSError as exc:
            raise ResolveError(f"cannot read {file.path}: {exc.strerror or exc}") from exc
        return replace(file, size=size, sha256=file.sha256 or sha256_of(file.path))
    stored = store.wheels / file.filename
    digest = digest_cache.digest(stored)
    if digest is None or digest != file.sha256:
        return file
    return replace(file, size=stored.stat().st_size)


def _download(file: ResolvedFile, store: Store, pip: Pip) -> ResolvedFile:
    """Download a file into the store; without a known digest, the first download is trusted."""
    if not file.filename.endswith(".whl"):
        return file  # pip would build it to learn its metadata
    folder = pip.scratch / "measured"
    name, version = file.identity
    digest = f" --hash=sha256:{file.sha256}" if file.sha256 else ""
    for line in (f"{name} @ {file.url}{digest}", f"{name}=={version}{digest}"):
        if pip.download([line], folder).returncode == 0:
            break
    downloaded = folder / file.filename
    if not downloaded.is_file():
        return file
    measured = replace(
        file,
        size=downloaded.stat().st_size,
        sha256=file.sha256 or sha256_of(downloaded),
    )
    with store.publishing(store.wheels / file.filename) as partial:
        shutil.copyfile(downloaded, partial)
    return measured
