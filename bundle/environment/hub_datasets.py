"""Data sets by their names on the hub, loaded offline from the snapshots in the hub's cache.

Offline, ``datasets`` (2.19 to 5) looks for a data set by name only among those that it has prepared
before. This makes it read the snapshot in the hub's cache as a directory; a file that is missing,
since only a part was asked for, is an error that names it. Copied into every environment as
``_stager_hub_datasets.py`` for patches of :mod:`.patches`, it imports the standard library only.
"""
# ruff: noqa: ANN401 - the values of a library that is not imported here have no types

import glob
import hashlib
import inspect
import logging
import os
import re
import threading
import types
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Optional

PART = ".stager-part"
"""A directory beside ``snapshots``: a file for each commit of which only some files are there, with
the paths of the others, one on each line."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words that mean a split in the names of files and folders (``datasets``: ``data_files.py``)."""
_SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Names that say a split of any name (``SPLIT_PATTERN_SHARDED`` there)."""
_BETWEEN = "[-._ 0-9]"  # characters that part such a word from others (``NON_WORDS_CHARS`` there)
_NO_DATA = (
    *("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip"),
    "dataset_dict.json",
)
"""Files that are never data unless a pattern names them (``FILES_TO_IGNORE`` there)."""
_HIDDEN = (r"(?:^|/)\.", r"(?:^|/)__[^/]*(?=/)")  # names of files or folders, and of folders
_SHOWN = 5  # missing files that a message names
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MARK = "reads_snapshots_for_stager"
_reading = threading.local()  # ``read_part``: what this thread reads; None for a whole data set


def is_needed(load: types.ModuleType) -> bool:
    """Return True if ``datasets.load`` is not patched, and the hub's cache has data sets."""
    return not hasattr(load.dataset_module_factory, _MARK) and _has_any("datasets--*")


def has_missing_files(file_download: types.ModuleType) -> bool:
    """Return True if ``huggingface_hub.file_download`` is not patched, and files were left out."""
    return not hasattr(file_download.hf_hub_download, _MARK) and _has_any(f"*/{PART}")


def has_hub_spaces(loading: types.ModuleType) -> bool:
    """Return True if ``evaluate.loading`` is not patched, and the hub's cache has Spaces."""
    return not hasattr(loading, _MARK) and _has_any("spaces--*")


def _has_any(pattern: str) -> bool:
    cache = os.environ.get("HF_HUB_CACHE", "")
    return os.path.isabs(cache) and bool(glob.glob(os.path.join(glob.escape(cache), pattern)))


def _find_offline_snapshot(
    name: str, revision: Optional[str], kind: str = "dataset", cache: str = ""
) -> Optional[Path]:
    """Return a repository's snapshot in the hub's cache; None if it has none, and when online."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in {"1", "ON", "YES", "TRUE"}:
        return None
    if not _NAME.fullmatch(name) or (kind == "dataset" and os.path.exists(name)):
        return None
    folder = f"{kind}s--{name.replace('/', '--')}"
    repository = Path(cache or os.environ.get("HF_HUB_CACHE", ""), folder)
    commit = str(revision or "main")
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def refuse_missing_files(file_download: Any) -> None:
    """Make a file that was left out an error: libraries would go on with another tokenizer."""
    fetch = file_download.hf_hub_download

    @wraps(fetch)
    def hf_hub_download(repo_id: str, filename: str, *args: Any, **kwargs: Any) -> Any:
        kind, cache = kwargs.get("repo_type") or "model", str(kwargs.get("cache_dir") or "")
        path = "/".join(filter(None, [kwargs.get("subfolder"), filename]))
        snapshot = _find_offline_snapshot(repo_id, kwargs.get("revision"), kind, cache)
        if snapshot is not None and path in _Part(repo_id, snapshot).missing:
            message = (
                f"{kind} {repo_id}: the bundle does not have {path}; take it with files = [...] in "
                f"assets.{kind}s of stager.toml, and build again"
            )
            # AutoProcessor, and whoever asks for generation_config.json, drop the error.
            logging.getLogger("stager").warning(message)
            raise FileNotFoundError(message)
        return fetch(repo_id, filename, *args, **kwargs)

    setattr(hf_hub_download, _MARK, True)
    file_download.hf_hub_download = hf_hub_download


def read_spaces(loading: Any) -> None:
    """Make ``evaluate.load`` find a metric, which is a Space, in the hub's cache when offline."""
    factory = loading.HubEvaluationModuleFactory
    get_module = factory.get_module

    @wraps(get_module)
    def get_module_offline(self: Any) -> Any:
        snapshot = _find_offline_snapshot(self.name, self.revision, "space")
        if snapshot is None:
            return get_module(self)
        names = ("module_type", "download_config", "download_mode", "dynamic_modules_path")
        return loading.LocalEvaluationModuleFactory(
            str(snapshot / f"{self.name.rpartition('/')[2]}.py"),
            **{name: getattr(self, name) for name in names},
        ).get_module()

    factory.get_module = get_module_offline
    setattr(loading, _MARK, True)


def split_files(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split of a configuration, as ``datasets`` finds them."""
    inner = _map_inner_paths(config, names)
    return {
        split: [inner[name] for name in inner if any(_matches_pattern(name, one) for one in found)]
        for split, found in split_patterns(config, names).items()
    }


def split_patterns(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """Return each split's patterns, or those that the files' names imply, below its folder."""
    data_files = config.get("data_files")
    if data_files is None:
        return _imply_splits(list(_map_inner_paths(config, names)))
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in _wrap_in_list(data_files):
        one = entry if isinstance(entry, Mapping) else {"path": entry}
        paths = map(str, _wrap_in_list(one.get("path", "")))
        patterns.setdefault(str(one.get("split", "train")), []).extend(paths)
    return patterns


def _wrap_in_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _map_inner_paths(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    folder = str(config.get("data_dir") or "").strip("/")
    start = f"{folder}/" if folder else ""
    return {name[len(start) :]: name for name in names if name.startswith(start)}


def _imply_splits(names: Sequence[str]) -> dict[str, list[str]]:
    data = [name for name in names if _matches_pattern(name, "**")]
    shards: dict[str, list[str]] = {}
    for match in filter(None, map(_SHARD.fullmatch, data)):
        shards.setdefault(match["split"], []).append(glob.escape(match.string))
    everything = {"train": list(map(glob.escape, data))} if data else {}
    by_folder, by_file = (_find_splits_by_word(data, in_folder) for in_folder in (True, False))
    return shards or by_folder or by_file or everything


def _find_splits_by_word(names: Sequence[str], in_folder: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for split, words in _KEYWORDS.items():
        end = "($|" if in_folder else "("
        word = re.compile(f"(.*{_BETWEEN})?({'|'.join(words)}){end}{_BETWEEN}.*)")
        for name in names:
            *folders, file = name.split("/")
            if any(map(word.fullmatch, folders if in_folder else [file])):
                found.setdefault(split, []).append(glob.escape(name))
    return found


def _matches_pattern(name: str, pattern: str) -> bool:
    """Match a path; hidden files, and names of no data files, only if the pattern names them."""
    pattern = pattern[2:] if pattern.startswith("./") else pattern.lstrip("/")
    file = name.rpartition("/")[2]
    if file in _NO_DATA and file != pattern.rpartition("/")[2]:
        return False
    found, wanted = ([len(re.findall(one, text)) for one in _HIDDEN] for text in (name, pattern))
    return found == wanted and _compile_pattern(pattern).fullmatch(name) is not None


@lru_cache(maxsize=None)
def _compile_pattern(pattern: str) -> "re.Pattern[str]":
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[!^]?\]?[^]/]*\])", pattern):
        if part[:1] == "[" and part[-1:] == "]":
            inner = re.sub(r"([\\\[])", r"\\\1", part[1:-1])
            text += f"[^{inner[1:]}]" if inner[:1] in ("!", "^") else f"[{inner}]"
        else:
            text += meanings.get(part, re.escape(part))
    return re.compile(text)


def read_snapshots(load: Any) -> None:
    """Make ``datasets.load`` look into the hub's cache when it is offline."""
    load.dataset_module_factory = _read_snapshot_first(load.dataset_module_factory)
    load.load_dataset = _refuse_partial_result(load.load_dataset)
    _patch_card_reader(load.MetadataConfigs, _keep_whole_splits)
    _patch_card_reader(load.DatasetInfosDict, _drop_split_sizes)


def _read_snapshot_first(make_module: Callable[..., Any]) -> Callable[..., Any]:
    def dataset_module_factory(path: str, *args: Any, **kwargs: Any) -> Any:
        revision = kwargs.get("revision", args[0] if args else None)
        snapshot = _find_offline_snapshot(path, revision)
        if snapshot is None:
            return make_module(path, *args, **kwargs)
        # In every call of the library all but the path is by name; a local one takes no revision.
        part = _Part(path, snapshot)
        part.refuse_script()
        part.refuse_missing(kwargs.get("data_files"), kwargs.get("data_dir"))
        _reading.read_part = part if part.is_part else None
        try:
            module = make_module(str(snapshot), **{**kwargs, "revision": None})
        finally:
            _reading.read_part = None
        words = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", path.rpartition("/")[2])
        name = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", words).lower()  # as ``datasets`` has it
        module.builder_kwargs["dataset_name"] = name
        if not part.is_explicit:
            # A new environment has the snapshot at a new path; what was prepared stays as good.
            module.hash = part.content_name
        return module

    setattr(dataset_module_factory, _MARK, True)
    return dataset_module_factory


def _refuse_partial_result(load_all: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a data set without a split that exists online: the bundle has a part."""

    @wraps(load_all)
    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        found = load_all(path, *args, **kwargs)
        given = inspect.signature(load_all).bind_partial(path, *args, **kwargs).arguments
        if isinstance(found, dict) and not given.get("data_files") and not given.get("data_dir"):
            config = next((one.config_name for one in found.values()), None)
            snapshot = _find_offline_snapshot(path, given.get("revision"))
            lost = _lost_splits.get((str(snapshot), str(config)), {})
            names = chain.from_iterable(lost[split] for split in lost if split not in found)
            if snapshot and (missing := list(names)):
                raise FileNotFoundError(_Part(path, snapshot).explain(missing))
        return found

    return load_dataset


class _Part:
    """A snapshot, of which some files may be missing."""

    def __init__(self, path: str, snapshot: Path) -> None:
        self.path = path
        self.snapshot = snapshot
        mark = snapshot.parent.parent / PART / snapshot.name
        self.is_part = mark.exists()
        self.missing = mark.read_text(encoding="utf-8").splitlines() if self.is_part else []
        self.is_explicit = False

    @cached_property
    def present(self) -> list[str]:
        files = (path for path in self.snapshot.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.snapshot)) for path in files)

    @property
    def content_name(self) -> str:
        if not self.is_part:
            return self.snapshot.name
        digest = hashlib.sha256("\n".join(self.present).encode()).hexdigest()
        return f"{self.snapshot.name}-{digest[:12]}"

    def refuse_script(self) -> None:
        """Refuse a data set that is a script, as new ``datasets`` do: its files are other data."""
        script = f"{self.path.rpartition('/')[2]}.py"
        if (self.snapshot / script).is_file() or script in self.missing:
            raise RuntimeError(f"Dataset scripts are not supported offline, but found {script}")

    def refuse_missing(self, data_files: Any, data_dir: Any) -> None:
        self.is_explicit = bool(data_files or data_dir)
        config = {"data_files": data_files or None, "data_dir": data_dir}
        lost = [*chain(*self.find_missing(config).values())] if self.is_explicit else []
        if lost:
            raise FileNotFoundError(self.explain(lost))

    def find_missing(self, config: Mapping[str, Any]) -> dict[str, list[str]]:
        found = split_files(config, [*self.present, *self.missing])
        missing = set(self.missing)
        kinds = {Path(name).suffix for name in {*chain(*found.values())} - missing}
        if kinds:  # of a folder the library takes the files of one kind: a licence left out is none
            missing = {name for name in missing if Path(name).suffix in kinds}
        names = {split: [*filter(missing.__contains__, files)] for split, files in found.items()}
        return {
            split: names[split] or [f"its split {split}"]
            for split, files in found.items()
            if names[split] or not files
        }

    def explain(self, lost: Sequence[str]) -> str:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        return (
            f"data set {self.path}: the bundle does not have {', '.join(lost[:_SHOWN])}{more}; "
            "take more of it in assets.datasets, or ask for a configuration and a split that it has"
        )


_lost_splits: dict[tuple[str, str], dict[str, list[str]]] = {}
"""Splits that are not whole, with their missing files, by snapshot and configuration."""


def _keep_whole_splits(configs: Any) -> Any:
    """Leave to each configuration of a card its splits of which all files are there.

    One without any names a missing file, so that the choice stays what it is, and comes last: the
    library looks at the files of the first one.
    """
    part = getattr(_reading, "read_part", None)
    if part is None:
        return configs
    named = dict(configs) or {"default": {}}
    lost = {name: part.find_missing(config) for name, config in named.items()}
    missing: list[str] = []
    for name, splits in lost.items():
        _lost_splits[str(part.snapshot), name] = splits
        missing += chain(*splits.values())
    if not missing:
        return configs
    whole = {name: _list_whole_splits(part, named[name], lost[name]) for name in named}
    if not part.is_explicit and not any(whole.values()):
        raise FileNotFoundError(part.explain(missing))
    configs.clear()
    for name in sorted(named, key=lambda name: not whole[name]):
        configs[name] = _replace_data_files(named[name], whole[name], lost[name])
    return configs


def _list_whole_splits(part: Any, config: Any, lost: Mapping[str, Any]) -> dict[str, Any]:
    patterns = split_patterns(config, [*part.present, *part.missing])
    return {split: patterns[split] for split in patterns if split not in lost}


def _replace_data_files(
    config: Mapping[str, Any], splits: Mapping[str, list[str]], lost: Mapping[str, list[str]]
) -> Mapping[str, Any]:
    if not lost:
        return config
    folder = str(config.get("data_dir") or "").strip("/")
    chosen = splits or {
        split: [glob.escape(os.path.relpath(files[0], folder or "."))]
        for split, files in lost.items()
    }
    entries = [{"split": split, "path": paths} for split, paths in chosen.items()]
    return {**config, "data_files": entries}


def _drop_split_sizes(infos: Any) -> Any:
    """Remove split infos of partial data sets: the library would report absent ones."""
    if getattr(_reading, "read_part", None) is not None:
        for info in infos.values():
            info.splits = info.download_size = info.dataset_size = None
    return infos


def _patch_card_reader(kind: Any, change: Callable[[Any], Any]) -> None:
    """Change what a class reads from a card; the class stays what it is, also when pickled."""
    original = kind.from_dataset_card_data.__func__

    def from_dataset_card_data(cls: Any, card: Any) -> Any:
        return change(original(cls, card))

    kind.from_dataset_card_data = classmethod(from_dataset_card_data)
