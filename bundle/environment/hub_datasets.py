"""Data sets by their names on the hub, loaded offline from the snapshots in the hub's cache.

Offline, ``datasets`` (2.19 to 5) looks for a data set by name only among those that it has prepared
before, never in the hub's cache that its own downloads go to. This module makes it read the
snapshot there as it would read a directory. What it prepares goes to ``HF_DATASETS_CACHE`` as ever.

This file is also copied into every environment as ``_stager_hub_datasets.py``, for the patch of
that name in :mod:`.patches`. It therefore stands alone: standard library only.
"""
# ruff: noqa: ANN401 - the values of a library that is not imported here have no types

import contextlib
import hashlib
import os
import re
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, Optional

PART = ".stager-part"
"""A directory beside ``snapshots``: a file for each commit of which only some files are there."""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MARK = "reads_snapshots_for_stager"
_reading = threading.local()
"""``root``: the snapshot that this thread reads at the moment, where only a part is there."""


def is_needed(load: types.ModuleType) -> bool:
    """Return True if ``datasets.load`` is not patched, and the hub's cache has data sets."""
    if hasattr(load.dataset_module_factory, _MARK):
        return False
    cache = Path(os.environ.get("HF_HUB_CACHE", ""))
    with contextlib.suppress(OSError):
        return cache.is_absolute() and any(cache.glob("datasets--*"))
    return False


def snapshot_of(name: str, revision: Optional[str]) -> Optional[Path]:
    """Return the directory of a data set's snapshot in the hub's cache; None if it has none."""
    if not _NAME.fullmatch(name) or os.path.exists(name):
        return None
    repository = Path(os.environ.get("HF_HUB_CACHE", ""), "datasets--" + name.replace("/", "--"))
    commit = str(revision or "main")
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def read_snapshots(load: Any) -> None:
    """Make ``datasets.load`` look into the hub's cache when it is offline."""
    original = load.dataset_module_factory

    def dataset_module_factory(path: str, *args: Any, **kwargs: Any) -> Any:
        """Return the module of a data set, from its snapshot where one is there."""
        revision = kwargs.get("revision", args[0] if args else None)
        snapshot = snapshot_of(path, revision) if _is_offline() else None
        if snapshot is None:
            return original(path, *args, **kwargs)
        # What follows the path is by name in every call of the library; a local one takes no
        # revision.
        with _part_of(snapshot):
            module = original(str(snapshot), **{**kwargs, "revision": None})
        module.builder_kwargs["dataset_name"] = _snake_case(path.rpartition("/")[2])
        if not kwargs.get("data_files") and not kwargs.get("data_dir"):
            # A new environment has the snapshot at a new path; what was prepared stays as good.
            module.hash = _content_name(snapshot)
        return module

    setattr(dataset_module_factory, _MARK, True)
    load.dataset_module_factory = dataset_module_factory
    _filter(load.MetadataConfigs, _present_only)
    _filter(load.DatasetInfosDict, _without_splits)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _snake_case(name: str) -> str:
    """Return a name as ``datasets`` writes it in the names of directories."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def _is_part(snapshot: Path) -> bool:
    """Return True if a snapshot has only some of its data set's files."""
    return (snapshot.parent.parent / PART / snapshot.name).exists()


def _content_name(snapshot: Path) -> str:
    """Return the commit of a snapshot, with a digest of the names of its files if it is a part."""
    if not _is_part(snapshot):
        return snapshot.name
    names = sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*"))
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return f"{snapshot.name}-{digest[:12]}"


@contextlib.contextmanager
def _part_of(snapshot: Path) -> Iterator[None]:
    """Note meanwhile that a snapshot has only some of its data set's files, where that is so."""
    _reading.root = snapshot if _is_part(snapshot) else None
    try:
        yield
    finally:
        _reading.root = None


def _present_only(configs: Any) -> Any:
    """Remove those configurations of a card whose files are not there."""
    root = getattr(_reading, "root", None)
    if root is not None:
        for name in list(configs):
            kept = _present(root, configs[name])
            if kept is None:
                del configs[name]
            else:
                configs[name] = kept
    return configs


def _without_splits(infos: Any) -> Any:
    """Remove the splits from a card's infos where only some files are there.

    The library compares what it has prepared with them, and misses those that were left out.
    """
    if getattr(_reading, "root", None) is not None:
        for info in infos.values():
            info.splits = info.download_size = info.dataset_size = None
    return infos


def _filter(kind: Any, change: Callable[[Any], Any]) -> None:
    """Change what a class reads from a card; the class stays what it is, also when pickled."""
    original = kind.from_dataset_card_data.__func__

    def from_dataset_card_data(cls: Any, card: Any) -> Any:
        return change(original(cls, card))

    kind.from_dataset_card_data = classmethod(from_dataset_card_data)


def _present(root: Path, config: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """Return a configuration with the data files that are there; None if there are none."""
    base = root / str(config.get("data_dir") or "")
    files = config.get("data_files")
    if files is None:
        return dict(config) if base.is_dir() else None
    if isinstance(files, list) and all(isinstance(entry, dict) for entry in files):
        kept = [entry for entry in files if _any_file(base, entry.get("path"))]
        return {**config, "data_files": kept} if kept else None
    return dict(config) if _any_file(base, files) else None


def _any_file(base: Path, patterns: object) -> bool:
    """Return True if a pattern, or one of a list of them, names a file."""
    listed = patterns if isinstance(patterns, list) else [patterns]
    return any(True for pattern in listed for _ in base.glob(str(pattern).lstrip("/")))
