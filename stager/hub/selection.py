"""The choice of the files of a repository that are taken."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ..core.errors import StagerError
from .names import HubRequest

_OTHER_FRAMEWORKS = (
    *("*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage/*", "*.onnx"),
    *("*.onnx_data", "onnx/*", "openvino/*", "coreml/*", "tf_model*", "flax_model*"),
)
"""Weights that PyTorch does not read."""
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Weights that ``from_pretrained`` reads only where there are no safetensors."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words that mean a split in the names of data files (``datasets``: ``data_files.py``)."""
_ALWAYS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a data set's repository that say what the others are."""


def selected(
    request: HubRequest, paths: Sequence[str], configs: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return the files to take, sorted.

    Args:
        request: the request.
        paths: all files of the repository.
        configs: ``configs`` of a data set's card.

    Raises:
        StagerError: the repository has no such files, configuration or split.
    """
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
    """Leave out weights of other frameworks, and those that exist as safetensors, too.

    A repository without any weights that PyTorch reads is taken as it is.
    """
    safe = {str(PurePosixPath(p).parent) for p in paths if p.endswith(".safetensors")}
    ours = bool(safe) or any(path.endswith((".bin", ".pt", ".pth")) for path in paths)
    if not ours:
        return list(paths)
    kept = []
    for path in paths:
        folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        pickled = folder in safe and _matches(name, _PICKLED)
        if not pickled and not _matches(path, _OTHER_FRAMEWORKS):
            kept.append(path)
    return kept


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _data_files(
    request: HubRequest, paths: Sequence[str], configs: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return the files of one configuration or split, with the card."""
    card = [path for path in paths if path in _ALWAYS]
    data: list[str] = []
    for folder, patterns in _patterns_of(request, configs):
        found = [path for path in paths if _in_pattern(path, folder, patterns)]
        if request.split and not patterns:
            found = [path for path in found if _has_keyword(path, request.split)]
        data += found
    return list(dict.fromkeys([*card, *data])) if data else []


def _patterns_of(
    request: HubRequest, configs: Sequence[Mapping[str, object]]
) -> list[tuple[str, list[str]]]:
    """Return folder and patterns of the data files; no pattern stands for all files of the folder.

    Raises:
        StagerError: the card lists no such configuration.
    """
    if not configs and not request.config:
        return [("", [])]
    wanted = [c for c in configs if request.config in ("", c.get("config_name"))]
    if not wanted:
        raise StagerError(
            f"data set {request.label} has no configuration {request.config!r}",
            hint="correct config of its entry in assets.datasets, or leave it out",
            context=[f"it has {config.get('config_name')}" for config in configs]
            or ["its card lists no configurations"],
        )
    return [_of_config(config, request) for config in wanted]


def _of_config(config: Mapping[str, object], request: HubRequest) -> tuple[str, list[str]]:
    folder = str(config.get("data_dir") or "").strip("/")
    files = config.get("data_files")
    if files is None:
        return folder, []
    patterns: list[str] = []
    for entry in files if isinstance(files, list) else [files]:
        split, path = "train", entry
        if isinstance(entry, Mapping):
            split, path = str(entry.get("split", "train")), entry.get("path", "")
        if request.split in ("", split):
            patterns += map(str, path if isinstance(path, list) else [path])
    return folder, patterns or ["/no such split/"]


def _in_pattern(path: str, folder: str, patterns: Sequence[str]) -> bool:
    if folder and not path.startswith(f"{folder}/"):
        return False
    inner = path[len(folder) + 1 :] if folder else path
    return not patterns or any(_glob(pattern).fullmatch(inner) for pattern in patterns)


def _glob(pattern: str) -> re.Pattern[str]:
    """Return a glob pattern as a regular expression: ``*`` stays in one directory."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./").lstrip("/"))
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meanings.get(part, re.escape(part)) for part in parts))


def _has_keyword(path: str, split: str) -> bool:
    words = re.split(r"[^a-z]+", path.lower())
    return any(word in words for word in _KEYWORDS.get(split, (split.lower(),)))
