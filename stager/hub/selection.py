"""The choice of the files of a repository that are taken."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from bundle.environment import hub_datasets

from ..core.errors import StagerError
from .names import HubRequest

_OTHER_FRAMEWORKS = (
    *("*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage/*", "*.onnx"),
    *("*.onnx_data", "onnx/*", "openvino/*", "coreml/*", "tf_model*", "flax_model*"),
)
"""Weights that PyTorch does not read."""
_PICKLED = re.compile(
    r"pytorch_model(\.(?P<variant>\w+))?(-\d+-of-\d+)?\.bin"
    r"|pytorch_model\.bin\.index(\.(?P<indexed>\w+))?\.json"
)
"""Weights that ``from_pretrained`` reads only where no safetensors of their name are."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of weights that PyTorch reads."""
_NO_WEIGHTS = (
    *("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*"),
    "openvino_*",
)
"""Files with such a suffix that are no weights of PyTorch: the Trainer's own, and OpenVINO's."""
_ALWAYS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a data set's repository that say what the others are."""


def selected(
    request: HubRequest, paths: Sequence[str], configs: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return the files to take, sorted.

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
    if not any(map(_is_weights, paths)):
        return list(paths)
    there = frozenset(paths)
    return [
        path
        for path in paths
        if not _matches(path, _OTHER_FRAMEWORKS) and not _is_replaced(path, there)
    ]


def _is_weights(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(_WEIGHTS) and not _matches(name, _NO_WEIGHTS)


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
    card = [path for path in paths if path in _ALWAYS]
    data: list[str] = []
    for config in _configs(request, configs):
        for split, files in hub_datasets.split_files(config, paths).items():
            if request.split in ("", split):
                data += files
    return list(dict.fromkeys([*card, *data])) if data else []


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
