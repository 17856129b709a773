"""``[environment]``, ``[assets]`` and ``[trust]``: what is installed, and whose it may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from bundle.launch.program_variables import CODE, DROPPED, RANK
from bundle.protocol.dataclass import dataclass

from ..hub.repositories import HubRequest, Kind, parse_request
from . import checks
from .checks import Check
from .job_settings import setting

OF_NODE, BUNDLED = "node", "bundled"
"""Words for ``interpreter``: the nodes' own Python, or the one that is at hand here."""
INDEX_STRATEGIES = ("first-index", "unsafe-first-match", "unsafe-best-match")  # of uv
HEADERS, TESTS = "headers", "tests"
PRUNABLE = (HEADERS, TESTS)  # :mod:`stager.layers.prune` defines the files of each
_PRUNABLE = " and ".join(f'"{word}"' for word in PRUNABLE)
# A version of Python and a platform that wheels are for, and such ones in words.
VERSION = checks.make_pattern_check(r"3\.\d+")
VERSIONS = 'major.minor in quotes, for example "3.11"'
PLATFORM = checks.make_pattern_check(r"(manylinux|musllinux)_\d+_\d+_\w+")
PLATFORMS = 'a Linux platform tag as in wheel names, for example "manylinux_2_28_x86_64"'
_PACKAGE = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?"
_TORCH = checks.make_pattern_check(r"none|auto|cpu|xpu|cu\d{2,3}|rocm\d+(\.\d+)*")


@checks.check(**_TORCH.schema)
def _read_torch_backend(value: object) -> str | None:
    return None if value == "none" else _TORCH(value)


def _interpreter(root: Path) -> Check[str]:
    """One of two words, or a path, which has a slash and becomes absolute."""

    @checks.check(type="string", pattern=f"^({OF_NODE}|{BUNDLED})$|/")
    def read(value: object) -> str:
        string = checks.text(value)
        if string in (OF_NODE, BUNDLED):
            return string
        if "/" not in string:
            raise ValueError
        return str(checks.path(root)(string))

    return read


@checks.check(**checks.texts.schema)
def _read_prune(value: object) -> tuple[str, ...]:
    """Words and patterns, sorted, each once; the packages' names are normalized."""
    entries = checks.read_each((("", one) for one in checks.texts(value)), _read_entry)
    return tuple(sorted({*entries}))


def _read_entry(entry: str) -> str:
    from packaging.utils import canonicalize_name  # not before: few settings have patterns

    name, colon, pattern = entry.partition(":")
    if not colon:
        if entry in PRUNABLE:
            return entry
        raise ValueError(f"unknown word {entry!r}; known are {_PRUNABLE}")
    if not re.fullmatch(_PACKAGE, name):
        raise ValueError(f"{entry!r} begins with no package's name: write PACKAGE:PATTERN")
    if not pattern.strip("/ ") or pattern.startswith(("#", "!")) or not pattern.isprintable():
        raise ValueError(f"{entry!r} has no pattern that leaves something out after its colon")
    return f"{canonicalize_name(name)}:{pattern}"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """``[environment]``: the requirements of the environment, and the machine it is for."""

    requirements: tuple[str, ...] = setting(
        checks.texts, 'a list of strings, for example ["requirements.txt"]'
    )
    constraints: tuple[str, ...] = setting(checks.texts, default=())
    python: str | None = setting(VERSION, VERSIONS)
    """Version of CPython as ``major.minor``; None for this interpreter's."""
    platform: str | None = setting(PLATFORM, PLATFORMS)
    """PEP 600 platform tag of the nodes; None for this machine's."""
    index_strategy: str | None = setting(
        checks.make_pattern_check("|".join(INDEX_STRATEGIES)),
        "one of " + ", ".join(f'"{word}"' for word in INDEX_STRATEGIES),
    )
    torch_backend: str | None = setting(
        _read_torch_backend,
        'the name of one of PyTorch\'s indexes ("cpu", "cu126", "rocm6.4", "xpu"), "auto", or '
        '"none"',
    )
    """Name of the PyTorch index to add: ``cpu``, ``cu126``..., ``auto``; None for none."""
    offline_root: Path | None = setting(checks.path, "a path", starts_at_root=True)
    imports: tuple[str, ...] = setting(
        checks.make_list_check(checks.make_pattern_check(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")),
        'a list of module names, for example ["torch", "datasets"]',
        default=(),
    )
    prune: tuple[str, ...] = setting(
        _read_prune,
        f'a list of {_PRUNABLE}, and of patterns such as "torch:/torch/test/"',
        default=(),
    )
    """What is left out of the wheels' layers: words of ``PRUNABLE``, and ``PACKAGE:PATTERN`` with
    the package's normalized name; sorted, each once."""
    find_links: tuple[str, ...] = setting(
        checks.places,
        'a list of folders or URLs with wheels, for example ["wheels"]',
        default=(),
        starts_at_root=True,
    )
    no_build_isolation: tuple[str, ...] = setting(
        checks.make_list_check(checks.make_pattern_check(_PACKAGE)),
        'a list of package names, for example ["flash-attn"]',
        default=(),
    )
    build_env: tuple[tuple[str, str], ...] = setting(
        checks.variables,
        'a table of variables and their values, for example { MAX_JOBS = "4" }',
        default={},
    )
    interpreter: str = setting(
        _interpreter,
        f'"{OF_NODE}", "{BUNDLED}", or the path of a Python, for example '
        '"~/.pyenv/versions/3.12.1"',
        default=OF_NODE,
        starts_at_root=True,
    )
    """Where the environment's Python comes from: :data:`OF_NODE`, :data:`BUNDLED`, or the absolute
    path of a Python, or of its folder, that the bundle is to bring."""


_OURS = re.compile(rf"PATH$|STAGER_|{DROPPED.pattern}|{RANK.pattern}")
"""Variables that ranks do not get from the settings."""
_REPOSITORIES = 'a list of names on the hub, for example ["org/name", "org/name@revision"]'


def _repositories(kind: Kind) -> Check[tuple[HubRequest, ...]]:
    def read_item(item: object) -> HubRequest:
        try:
            return parse_request(kind, item)
        except ValueError as exc:
            allowed = "org/name, org/name@revision, or a table with name and more, as"
            raise ValueError(f"{exc}; allowed: {allowed} docs/models.md says") from exc

    @checks.check(type="array", items={"type": ["string", "object"]})
    def read(value: object) -> tuple[HubRequest, ...]:
        if not isinstance(value, list):
            raise ValueError
        items = ((f"[{number}]", item) for number, item in enumerate(value))
        return tuple(dict.fromkeys(checks.read_each(items, read_item)))

    return read


def _refuse_ours(name: str) -> str:
    if _OURS.match(name) or name in CODE:
        raise ValueError("stager sets this variable itself")
    return name


_NAMES = checks.make_list_check(checks.make_pattern_check(checks.VARIABLE))


@checks.check(type="array", items={"type": "string", "pattern": f"^{checks.VARIABLE}$"})
def _cache_variables(value: object) -> tuple[str, ...]:
    names = ((f"[{number}]", name) for number, name in enumerate(_NAMES(value)))
    return checks.read_each(names, _refuse_ours)


def _make_variables_check(root: Path) -> Callable[[object], tuple[tuple[str, Path], ...]]:
    def read_pair(pair: tuple[str, str]) -> tuple[str, Path]:
        name, text = pair
        if _OURS.match(name):
            raise ValueError("stager sets this variable itself")
        try:
            return name, checks.path(root)(text)
        except ValueError:
            raise ValueError(f"{text!r} is no path") from None

    def read(value: object) -> tuple[tuple[str, Path], ...]:
        pairs = ((f".{pair[0]}", pair) for pair in checks.variables(value))
        return checks.read_each(pairs, read_pair)

    return read


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """``[assets]``: models and data, fetched at build time and never later."""

    paths: tuple[Path, ...] = setting(
        checks.paths, "a list of paths", default=(), starts_at_root=True
    )
    """Files and folders, absolute, with those that ``env`` names."""
    env: tuple[tuple[str, Path], ...] = setting(
        _make_variables_check,
        'a table of paths, { TIKTOKEN_CACHE_DIR = "caches/tiktoken" }',
        default=(),
        starts_at_root=True,
    )
    """Variables of the ranks, each with the asset that it is the place of."""
    caches: tuple[str, ...] = setting(
        _cache_variables,
        'a list of names of variables, for example ["FLASHINFER_WORKSPACE_BASE"]',
        default=(),
    )
    """Variables of libraries that say where they keep the code that they compile."""
    models: tuple[HubRequest, ...] = setting(_repositories("model"), _REPOSITORIES, default=())
    datasets: tuple[HubRequest, ...] = setting(_repositories("dataset"), _REPOSITORIES, default=())
    spaces: tuple[HubRequest, ...] = setting(_repositories("space"), _REPOSITORIES, default=())


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """``[trust]``: whose signature a bundle must have before anything of it runs."""

    allowed_signers: Path | None = setting(
        checks.path, "a path, as of an allowed_signers file", starts_at_root=True
    )
    """The file with the keys that may sign, as ``ssh-keygen(1)`` describes it; None for none."""
    require: bool = setting(checks.boolean, default=False)


# --- Experiment trackers that write to the run directory where there is no network ---------------

_FOLDERS = {
    "wandb": ("wandb",),
    "mlflow": ("mlruns", "mlflow.db"),
    "mlflow-skinny": ("mlruns", "mlflow.db"),
    "tensorboard": ("runs",),
    "tensorboardx": ("runs",),
}
"""By package, the names that it gives its results by default."""


def list_tracker_outputs(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the names that trackers give their results, of those among some packages."""
    present = {*packages}
    names = [name for package, names in _FOLDERS.items() if package in present for name in names]
    return tuple(dict.fromkeys(names))
