"""The hub, through ``huggingface_hub``, which is imported here alone, and has the token."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle.environment import hub_datasets
from bundle.format.layer import abridge_path, explain_excess
from bundle.protocol.counts import format_size
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest

from ..core import toml
from ..core.errors import ConfigError, StagerError
from ..core.store import Store, digest_file, write_error
from .repositories import HubFile, HubRequest, LockedRepository, is_safe

_INSTALL = "uv tool install --reinstall '.[hub]'"
_TOO_MANY = 429  # a status of HTTP
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)
_WHY_LINES = 3


@dataclass(frozen=True, kw_only=True)
class HubEntry:
    """A file of a repository, as the hub describes it."""

    path: str
    size: int
    sha256: Digest | None  # None for a small file, for which the hub has none
    blob: str = ""  # Git's own digest of a small file; empty where the hub does not say it
    problem: str = ""


def _describe_repository(request: HubRequest) -> tuple[str, Mapping[str, object], list[HubEntry]]:
    library = _library()
    with _convert_errors(request):
        api = library.HfApi(endpoint=_endpoint(), library_name="stager")
        info = api.repo_info(
            request.name,
            revision=request.revision or None,
            repo_type=request.kind,
            files_metadata=True,
        )
        card = info.card_data.to_dict() if hasattr(info.card_data, "to_dict") else {}
    if not isinstance(info.sha, str) or not re.fullmatch(r"[0-9a-f]{40}", info.sha):
        raise StagerError(
            f"{request.kind} {request.label}: the hub names no commit, but {info.sha!r}",
            hint="check HF_ENDPOINT: what answers there is not a hub",
        )
    return info.sha, card, list(map(_entry, info.siblings or ()))


def _fetch_file(request: HubRequest, commit: str, path: str, cache: Path) -> Path:
    """Return the path of a file in a cache; fetch it, or the rest of it, if it is not there."""
    library = _library()
    with _convert_errors(request):
        place = {"repo_type": request.kind, "revision": commit, "endpoint": _endpoint()}
        found = Path(library.hf_hub_download(request.name, path, cache_dir=cache, **place))
    # It stores a file under the name that the server gives its content, wherever that leads.
    if not found.resolve().is_relative_to(cache.resolve()):
        raise StagerError(
            f"{request.kind} {request.label}: the hub gives {path} a name that leads out of "
            f"{cache}: {found.resolve()}",
            hint="check HF_ENDPOINT: what answers there is not a hub; look at that file",
        )
    return found


def _library() -> Any:  # noqa: ANN401 - a module that need not be installed
    # Both variables count when it is imported. Its progress bars are for a terminal only.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import huggingface_hub
    except ImportError as exc:
        raise ConfigError(
            "models, datasets and spaces in [assets] need huggingface_hub, which is not installed",
            hint=f"in the clone of stager: {_INSTALL}; else: pip install huggingface_hub",
            context=[str(exc)],
        ) from exc
    return huggingface_hub


def _endpoint() -> str | None:
    """Return the address in HF_ENDPOINT, which the library reads only once, at its import."""
    return os.environ.get("HF_ENDPOINT") or None


@contextlib.contextmanager
def _convert_errors(request: HubRequest) -> Iterator[None]:
    try:
        yield
    # Its errors come from three HTTP libraries by version, and from its own classes.
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in _FULL:
            place = Path(exc.filename or f"the files of {request.label}")
            raise write_error(place, exc) from exc
        raise _fault(request, exc) from exc


_FAULTS = {
    "GatedRepoError": (
        " is gated: the hub gives it only to users who accepted its terms",
        "accept them on the page of {name}, then log in with `hf auth login` or set HF_TOKEN, and "
        "run this again; the token stays on this machine",
    ),
    "RevisionNotFoundError": (
        ": there is no such revision",
        "correct what follows the @ (a branch, a tag or a commit)",
    ),
    "RepositoryNotFoundError": (
        ": the hub has no such repository, or shows it to some users only",
        "check its name; for a private one log in with `hf auth login` or set HF_TOKEN",
    ),
    "OfflineModeIsEnabled": (
        " must be asked for at the hub, and HF_HUB_OFFLINE forbids that",
        "unset HF_HUB_OFFLINE for this command",
    ),
}


def _fault(request: HubRequest, exc: Exception) -> StagerError:
    kinds = {kind.__name__ for kind in type(exc).__mro__}
    what = f"{request.kind} {request.label}"
    status = _status(exc)
    if status in (401, 403):
        kinds.add("RepositoryNotFoundError")
    for kind, (meaning, remedy) in _FAULTS.items():
        if kind in kinds:
            return StagerError(what + meaning, hint=remedy.format(name=request.name))
    hint = "check the network and HF_ENDPOINT, and run this again: files that are whole are kept"
    if status == _TOO_MANY:
        hint = "it has had too many requests: wait some minutes; `hf auth login` raises the limit"
    return StagerError(
        f"{what}: the hub did not give it", hint=hint, context=_reasons(exc.__cause__ or exc)
    )


def _status(exc: BaseException | None) -> int | None:
    while exc is not None:
        status = getattr(getattr(exc, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        exc = exc.__cause__
    return None


def _reasons(exc: BaseException) -> list[str]:
    text = re.sub(r"\bhf_\w{8,}", "hf_***", f"{type(exc).__name__}: {exc}")
    return list(filter(str.strip, text.splitlines()))[:_WHY_LINES]


def _licence(card: Mapping[str, object]) -> str:
    value = card.get("license")
    if value == "other" and isinstance(card.get("license_name"), str):
        value = card["license_name"]
    names = value if isinstance(value, list) else [value]
    return ", ".join(str(name) for name in names if name and str(name).isprintable())[:200]


def _entry(sibling: Any) -> HubEntry:  # noqa: ANN401 - the library's
    """Check the hub's answer about one file; a problem matters only if the file is selected."""
    path, size, lfs = str(sibling.rfilename), sibling.size, sibling.lfs
    digest, problem = None, ""
    try:
        digest = Digest(lfs.sha256) if lfs else None
    except (ValueError, TypeError):
        problem = "its digest is not a sha256"
    if not is_safe(path):
        problem = "its name leaves the repository, or cannot be printed"
    elif explain_excess(path):
        problem = f"no node can hold {explain_excess(path)}"
    elif type(size) is not int or size < 0:
        problem = f"its size is {size!r}"
    return HubEntry(
        path=path,
        size=0 if problem else size,
        sha256=digest,
        blob="" if lfs else str(sibling.blob_id or ""),
        problem=problem,
    )


Progress = Callable[[str], None]


def user_caches(variables: Mapping[str, str]) -> list[Path]:
    """Return the places where the user's own programs keep files of the hub, likeliest first."""
    named = [variables[name] for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
             if variables.get(name)]  # fmt: skip
    if variables.get("HF_HOME"):
        named[-1] += "/hub"
    named.append(f"{variables.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface/hub")
    # As the library reads them; Path's own expansion raises where there is no such home.
    return [Path(os.path.expanduser(name)) for name in named]  # noqa: PTH111


def is_the_users(folder: Path, variables: Mapping[str, str]) -> bool:
    """Return whether the user's own programs keep their files of the hub in a folder."""
    return folder.resolve() in (cache.resolve() for cache in user_caches(variables))


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """Files of the hub, from the user's caches, else fetched into the offline root."""

    offline: bool
    store: Store
    progress: Progress

    def digest(self, request: HubRequest, commit: str, entry: HubEntry) -> Digest:
        """Return the digest of a small file, fetched if it is not here as the hub lists it."""
        file = (request, commit, entry.path, entry.size)
        return digest_file(self._obtain(*file, lambda found: _is_listed(found, entry)))

    def obtain_locked(self, repository: LockedRepository, file: HubFile) -> Path:
        """Return a file with the content that the lock says, fetched if it is not here."""

        def is_right(found: Path) -> bool:
            return found.stat().st_size == file.size and digest_file(found) == file.sha256

        return self._obtain(repository.request, repository.commit, file.path, file.size, is_right)

    def _obtain(
        self,
        request: HubRequest,
        commit: str,
        path: str,
        size: int,
        is_right: Callable[[Path], bool],
    ) -> Path:
        for cache in (*user_caches(os.environ), self.store.hub):
            file = cache / request.folder / "snapshots" / commit / path
            with contextlib.suppress(OSError):
                if file.is_file() and is_right(file):
                    return file
        if self.offline:
            raise StagerError(
                f"{request.kind} {request.label} is not on this machine: {path} is missing, and "
                "nothing may be fetched",
                hint="run `stager build` once where the hub can be reached",
                context=[f"looked in {cache}" for cache in user_caches(os.environ)],
            )
        self.store.require_space(size, f"{request.name} {path}")
        self.progress(f"{request.label} {path}, {format_size(size)}")
        file = _fetch_file(request, commit, path, self.store.hub)
        if not is_right(file):
            file.resolve().unlink(missing_ok=True)  # fetched once more, the next time
            raise StagerError(
                f"{request.kind} {request.label}: {path} is not the file that the hub lists, or "
                "that was locked: its size or its digest is another",
                hint="run this again; else check HF_ENDPOINT and the proxy, or run `stager lock`",
            )
        return file


def _is_listed(path: Path, entry: HubEntry) -> bool:
    """Compare a file with the hub's size and, if known, git SHA-1: it finds damage, not attacks."""
    if path.stat().st_size != entry.size:
        return False
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return entry.blob in ("", blob.hexdigest())


_OTHER_FRAMEWORKS = (
    *("*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage/*", "*.onnx"),
    *("*.onnx_data", "onnx/*", "openvino/*", "coreml/*", "tf_model*", "flax_model*"),
)
_PICKLED = re.compile(
    r"pytorch_model(\.(?P<variant>\w+))?(-\d+-of-\d+)?\.bin"
    r"|pytorch_model\.bin\.index(\.(?P<indexed>\w+))?\.json"
)
"""Weights that ``from_pretrained`` reads only where no safetensors of their name are."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = (
    *("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "openvino_*"),
)
_ALWAYS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # they say what the others are


def select_files(
    request: HubRequest, paths: Sequence[str], configs: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return the files to take, sorted."""
    if request.files:
        chosen = [path for path in paths if _matches(path, request.files)]
    elif request.kind == "model":
        chosen = _model_files(paths)
    elif request.config or request.split:
        chosen = _data_files(request, paths, configs)
    else:
        chosen = list(paths)
    if not chosen:
        raise StagerError(
            f"{request.kind} {request.label}: no file of it is asked for",
            hint="correct files, config or split of its entry in stager.toml",
            context=[f"it has {path}" for path in sorted(paths)[:20]],
        )
    return sorted(chosen)


def _model_files(paths: Sequence[str]) -> list[str]:
    """Leave out weights of other frameworks, and those that exist as safetensors, too."""
    names = (path.rpartition("/")[2] for path in paths if path.endswith(_WEIGHTS))
    if all(_matches(name, _NO_WEIGHTS) for name in names):  # there are none that PyTorch reads
        return list(paths)
    kept = (path for path in paths if not _matches(path, _OTHER_FRAMEWORKS))
    return [path for path in kept if not _is_replaced(path, paths)]


def _is_replaced(path: str, there: Collection[str]) -> bool:
    """Find pickled weights that their folder also has as safetensors; an adapter's do not count."""
    folder, _, name = path.rpartition("/")
    match = _PICKLED.fullmatch(name)
    if match is None:
        return False
    variant = match["variant"] or match["indexed"]
    dotted = f".{variant}" if variant else ""
    names = (f"model{dotted}.safetensors", f"model.safetensors.index{dotted}.json")
    return any((f"{folder}/{name}" if folder else name) in there for name in names)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _data_files(
    request: HubRequest, paths: Sequence[str], configs: Sequence[Mapping[str, object]]
) -> list[str]:
    data: set[str] = set()
    for config in _configs(request, configs):
        for split, files in hub_datasets.split_files(config, paths).items():
            if request.split in ("", split):
                data.update(files)
    return [*(data.union(_ALWAYS) & set(paths))] if data else []


def _configs(
    request: HubRequest, configs: Sequence[Mapping[str, object]]
) -> Sequence[Mapping[str, object]]:
    """Return the requested configurations; an empty one where a card lists none."""
    if not configs and request.config in ("", "default"):
        return [{}]
    wanted = [c for c in configs if request.config in ("", c.get("config_name", "default"))]
    if not wanted:
        raise StagerError(
            f"data set {request.label} has no configuration {request.config!r}",
            hint="correct config of its entry in assets.datasets, or leave it out",
            context=[f"it has {config.get('config_name')}" for config in configs]
            or ["its card lists no configurations"],
        )
    return wanted


def resolve(
    requests: Sequence[HubRequest], known: Sequence[LockedRepository], files: HubFiles
) -> tuple[LockedRepository, ...]:
    """Resolve requests, each at most once: what is known stays as it is."""
    resolved = {repository.request: repository for repository in known}
    faults: list[StagerError] = []
    for request in dict.fromkeys(requests):
        try:
            resolved[request] = resolved.get(request) or _resolve_one(request, files)
        except StagerError as exc:
            faults.append(exc)
            if exc.context:  # the hub did not answer: it would not answer for the others either
                break
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise StagerError(
            f"{len(faults)} models and data sets cannot be had",
            hint="; ".join(dict.fromkeys(fault.hint for fault in faults)),
            context=[fault.message for fault in faults],
        )
    return tuple(map(resolved.__getitem__, dict.fromkeys(requests)))


def _resolve_one(request: HubRequest, files: HubFiles) -> LockedRepository:
    if files.offline:
        raise StagerError(
            f"{request.kind} {request.label} is not in the lock, and nothing may be fetched",
            hint="run `stager lock` once where the hub can be reached",
        )
    commit, card, entries = _describe_repository(request)
    configs = [one for one in toml.get_list(card, "configs") if isinstance(one, dict)]
    paths = {*select_files(request, [entry.path for entry in entries], configs)}
    taken = _list_usable(request, entries, paths)
    digests = [one.sha256 or files.digest(request, commit, one) for one in taken]
    listed = zip(taken, digests, strict=True)
    return LockedRepository(
        request=request,
        commit=commit,
        licence=_licence(card),
        files=tuple(HubFile(path=one.path, size=one.size, sha256=key) for one, key in listed),
        left_out=tuple(sorted(filter(is_safe, {one.path for one in entries} - paths))),
    )


def _list_usable(
    request: HubRequest, entries: Sequence[HubEntry], paths: Collection[str]
) -> list[HubEntry]:
    taken = sorted((one for one in entries if one.path in paths), key=lambda one: one.path)
    unusable = [entry for entry in taken if entry.problem]
    if unusable:
        raise StagerError(
            f"{request.kind} {request.label}: the hub lists files that cannot be used",
            hint="name others with files = [...] in its entry of stager.toml, or check HF_ENDPOINT",
            context=[f"{abridge_path(entry.path)!r}: {entry.problem}" for entry in unusable],
        )
    return taken
