"""``[environment]``: the requirements of the environment, and the machine it is for."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError
from ..core.values import Target
from . import checks
from .table import Table

PYPROJECT = "pyproject.toml"
OF_NODE, BUNDLED = "node", "bundled"
"""Words for ``interpreter``: the nodes' own Python, or the one that is at hand here."""
INDEX_STRATEGIES = ("first-index", "unsafe-first-match", "unsafe-best-match")
"""What uv may do where several indexes have a package."""
HEADERS, TESTS = "headers", "tests"
PRUNABLE = (HEADERS, TESTS)
"""Words that ``prune`` may name; :mod:`stager.layers.prune` defines the files of each."""
VERSION = checks.matching(r"3\.\d+")
"""A version of Python."""
VERSIONS = 'major.minor in quotes, for example "3.11"'
"""Such versions, in words."""
PLATFORM = checks.matching(r"(manylinux|musllinux)_\d+_\d+_\w+")
"""A platform that wheels are for."""
PLATFORMS = 'a Linux platform tag as in wheel names, for example "manylinux_2_28_x86_64"'
"""Such platforms, in words."""
_PACKAGE = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """``[environment]``: the requirements of the environment, and the machine it is for."""

    requirements: tuple[str, ...]
    """Requirement files or requirement strings, as written; see :mod:`stager.lock.spec`."""
    constraints: tuple[str, ...]
    """Constraint files or strings, as written."""
    python: str | None
    """Version of CPython as ``major.minor``; None for this interpreter's."""
    platform: str | None
    """PEP 600 platform tag of the nodes; None for this machine's."""
    index_strategy: str | None
    """uv's rule for a package that several indexes have: a word of ``INDEX_STRATEGIES``."""
    torch_backend: str | None
    """Name of the PyTorch index to add: ``cpu``, ``cu126``..., ``auto``; None for none."""
    offline_root: Path | None
    """Directory for wheels, layers and bundles; None for the default."""
    imports: tuple[str, ...]
    """Modules that the build imports to prove that the environment works."""
    prune: tuple[str, ...]
    """What is left out of the wheels' layers: words of ``PRUNABLE``, and ``PACKAGE:PATTERN`` with
    the package's normalized name; sorted, each once."""
    find_links: tuple[str, ...] = ()
    """Folders, or pages, with prebuilt wheels; folders are absolute."""
    no_build_isolation: tuple[str, ...] = ()
    """Packages that are built from source with the environment's packages at hand."""
    build_env: tuple[tuple[str, str], ...] = ()
    """Variables for builds from source, with their values."""
    interpreter: str = OF_NODE
    """Where the environment's Python comes from: :data:`OF_NODE`, :data:`BUNDLED`, or the absolute
    path of a Python, or of its folder, that the bundle is to bring."""


def environment(table: Table, root: Path, source: Path) -> EnvironmentConfig:
    """Read the table; problems are noted in it."""
    config = EnvironmentConfig(
        requirements=_requirements(table, source),
        constraints=table.take("constraints", (), checks.texts, "a list of strings"),
        python=table.take("python", None, VERSION, VERSIONS),
        platform=table.take("platform", None, PLATFORM, PLATFORMS),
        index_strategy=table.take(
            "index-strategy",
            None,
            checks.matching("|".join(INDEX_STRATEGIES)),
            "one of " + ", ".join(f'"{word}"' for word in INDEX_STRATEGIES),
        ),
        torch_backend=table.take(
            "torch-backend",
            None,
            checks.torch_backend,
            'the name of one of PyTorch\'s indexes ("cpu", "cu126", "rocm6.4", "xpu"), "auto", or '
            '"none"',
        ),
        offline_root=table.take("offline-root", None, checks.path(root), "a path"),
        imports=table.take(
            "imports",
            (),
            checks.each(checks.matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")),
            'a list of module names, for example ["torch", "datasets"]',
        ),
        prune=_prune(table),
        find_links=table.take(
            "find-links",
            (),
            checks.each(checks.place(root)),
            'a list of folders or URLs with wheels, for example ["wheels"]',
        ),
        no_build_isolation=table.take(
            "no-build-isolation",
            (),
            checks.each(checks.matching(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")),
            'a list of package names, for example ["flash-attn"]',
        ),
        build_env=table.take(
            "build-env",
            (),
            checks.variables,
            'a table of variables and their values, for example { MAX_JOBS = "4" }',
            shown={},
        ),
        interpreter=_interpreter(table, root),
    )
    _check_target(table, config)
    return config


def _interpreter(table: Table, root: Path) -> str:
    return table.take(
        "interpreter",
        OF_NODE,
        checks.interpreter(root, (OF_NODE, BUNDLED)),
        f'"{OF_NODE}", "{BUNDLED}", or the path of a Python, for example '
        '"~/.pyenv/versions/3.12.1"',
    )


def _requirements(table: Table, source: Path) -> tuple[str, ...]:
    """Return ``requirements``; settings in a ``pyproject.toml`` name that file by default."""
    own = (PYPROJECT,) if source.name == PYPROJECT else None
    listed = table.take(
        "requirements", own, checks.texts, 'a list of strings, for example ["requirements.txt"]'
    )
    if listed is None and not table.has("requirements"):
        table.problem("requirements", 'missing; name what to install: ["requirements.txt"]')
    return listed or ()


def _prune(table: Table) -> tuple[str, ...]:
    allowed = " and ".join(f'"{word}"' for word in PRUNABLE)
    kind = f'a list of {allowed}, and of patterns such as "torch:/torch/test/"'
    entries = table.take("prune", (), checks.texts, kind)
    taken = set()
    for entry in entries:
        fault = _pattern_fault(entry) if ":" in entry else _word_fault(entry, allowed)
        if fault:
            table.problem("prune", fault)
            continue
        taken.add(_normalized(entry) if ":" in entry else entry)
    return tuple(sorted(taken))


def _normalized(entry: str) -> str:
    from packaging.utils import canonicalize_name  # not before: few settings have patterns

    name, _, pattern = entry.partition(":")
    return f"{canonicalize_name(name)}:{pattern}"


def _word_fault(word: str, allowed: str) -> str:
    if word in PRUNABLE:
        return ""
    near = difflib.get_close_matches(word.lower(), PRUNABLE, n=1)
    there = f'did you mean "{near[0]}"?' if near else f"known are {allowed}"
    return f"unknown word {word!r}; {there}"


def _pattern_fault(entry: str) -> str:
    name, _, pattern = entry.partition(":")
    if not _PACKAGE.fullmatch(name):
        return f"{entry!r} begins with no package's name: write PACKAGE:PATTERN"
    if not pattern.strip("/ ") or pattern.startswith(("#", "!")) or not pattern.isprintable():
        return f"{entry!r} has no pattern that leaves something out after its colon"
    return ""


def _check_target(table: Table, config: EnvironmentConfig) -> None:
    """Check the target now, so that its problem is listed with the others."""
    try:
        Target(python=config.python or "3.11", platform=config.platform or "manylinux_2_28_x86_64")
    except ConfigError as exc:
        table.problems.append(exc.message)
