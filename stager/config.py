"""``stager.toml``: finding it, checking every value in it, and the values it becomes.

Parsing happens here, once: after :func:`load` every value has its type and its range, paths are
absolute, and defaults are filled in. A default of None means "decided later, from the machine".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .model import Target
from .settings import checks, toml
from .settings.table import Table

FILE_NAME = "stager.toml"
PYPROJECT = "pyproject.toml"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """``[environment]``: what the environment is made of, and for which machine."""

    requirements: tuple[str, ...]
    """Requirement files or requirement strings, as written; see :mod:`stager.spec`."""
    constraints: tuple[str, ...]
    """Constraint files or strings, as written."""
    python: str | None
    """Version of CPython as ``major.minor``; None for this interpreter's."""
    platform: str | None
    """PEP 600 platform tag of the nodes; None for this machine's."""
    torch_backend: str | None
    """Which of PyTorch's own indexes to add: ``cpu``, ``cu126``...; None for none."""
    offline_root: Path | None
    """Where wheels, layers and bundles are kept; None for the default place."""
    imports: tuple[str, ...]
    """Modules that the build imports to prove that the environment works."""


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """``[project]``: the user's own code."""

    path: Path | None
    """The folder that is shipped; None (``path = false``) ships none."""
    exclude: tuple[str, ...]
    """Patterns in the form of ``.gitignore``, on top of that file, of what is not shipped."""
    outputs: tuple[str, ...]
    """Paths below the run directory that are brought back when the job ends."""
    command: tuple[str, ...]
    """What every rank runs when the command line names nothing."""


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """``[assets]``: models and data, fetched at build time and never later."""

    paths: tuple[Path, ...]
    """Files and folders, absolute."""
    models: tuple[str, ...]
    """Names of models (and their tokenizers) on the model hub."""
    datasets: tuple[str, ...]
    """Names of data sets on the hub."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """``[cluster]``: what to ask Slurm for. None leaves an option to Slurm's own default."""

    nodes: int
    """How many nodes, 1 or more."""
    partition: str | None
    """Slurm partition."""
    cpus_per_task: int | None
    """CPUs for each task, 1 or more."""
    time: str | None
    """Time limit in one of Slurm's forms: minutes, ``HH:MM:SS``, ``D-HH:MM``..."""
    account: str | None
    """Slurm account that is charged."""
    exclude: str | None
    """Nodes to avoid, as a Slurm node list."""
    salloc_args: tuple[str, ...]
    """Further options, passed on as they are."""
    node_root: str
    """Directory on each node under which the store is made; ``auto`` looks for a local one."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """``[launch]``: how the ranks are started."""

    nproc_per_node: int | None
    """Ranks on each node, 1 or more; None for one a GPU, else 1."""
    launcher: str
    """``torchrun`` or ``srun``."""
    backend: str
    """``nccl``, ``gloo``, or ``auto``: nccl where every node has a GPU."""
    interface: str | tuple[tuple[str, str], ...]
    """``auto``, one interface's name, or pairs of a node pattern and an interface's name."""
    omp_num_threads: int | None
    """Threads a rank, 1 or more; None for the task's CPUs divided by its ranks."""
    max_restarts: int
    """How often torchrun starts a failed group of ranks again, 0 or more."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything one project says about itself."""

    name: str
    """Names the bundle's file and the job; letters, digits, dot, dash and underscore."""
    root: Path
    """The folder the file stands in; relative paths start here."""
    source: Path
    """The file it was read from."""
    environment: EnvironmentConfig
    """What is installed."""
    project: ProjectConfig
    """The user's own code."""
    assets: AssetsConfig
    """Models and data."""
    cluster: ClusterConfig
    """What to ask Slurm for."""
    launch: LaunchConfig
    """How the ranks are started."""


def load(start: Path) -> Config:
    """Find and read the project's settings.

    Args:
        start: a settings file, or the folder from which to look upwards: the nearest
            ``stager.toml``, or ``pyproject.toml`` with a ``[tool.stager]`` table, wins.

    Raises:
        ConfigError: no such file, not TOML, or values that cannot be used (all of them).
    """
    start = start.absolute()
    if start.is_file():
        return _load_file(start)
    looked = [start, *start.parents]
    for folder in looked:
        own = folder / FILE_NAME
        if own.is_file():
            return _load_file(own)
        shared = folder / PYPROJECT
        if shared.is_file() and _mentions_us(shared):
            return _load_file(shared)
    raise ConfigError(
        f"no {FILE_NAME}, and no {PYPROJECT} with a [tool.stager] table",
        hint="run `stager init` to write one, or go to the project's folder",
        context=[f"looked in {start} and every folder above it"],
    )


def parse(data: Mapping[str, Any], *, root: Path, source: Path) -> Config:
    """Turn a parsed document into checked values; touches no file.

    Args:
        data: the document (of a ``pyproject.toml``: the ``[tool.stager]`` table).
        root: the folder that relative paths start from.
        source: the file the document was read from; a ``pyproject.toml`` supplies its own
            dependencies as the default of ``environment.requirements``.

    Raises:
        ConfigError: values or keys that cannot be used; one context line for each.
    """
    top = Table(data)
    environment = _environment(top.table("environment"), root, source)
    name, project = _project(top.table("project"), root)
    config = Config(
        name=name,
        root=root,
        source=source,
        environment=environment,
        project=project,
        assets=_assets(top.table("assets"), root),
        cluster=_cluster(top.table("cluster")),
        launch=_launch(top.table("launch")),
    )
    problems = top.finish()
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{source}: {many} in the settings",
            hint="`stager init` writes a file in which every key is explained",
            context=problems,
        )
    return config


def template(requirements: Sequence[str]) -> str:
    """The commented ``stager.toml`` that ``stager init`` writes.

    Args:
        requirements: what ``environment.requirements`` shall say, in the same notation.
    """
    text = Path(__file__).with_name("template.toml").read_text(encoding="utf-8")
    line = toml.dumps({"requirements": list(requirements)}).rstrip("\n")
    return text.replace("requirements = []", line, 1)


def _load_file(path: Path) -> Config:
    data = toml.read(path)
    if path.name == PYPROJECT:
        data = data.get("tool", {}).get("stager", {})
    return parse(data, root=path.parent, source=path)


def _mentions_us(path: Path) -> bool:
    """Whether a pyproject.toml is ours to read; a broken one that is not must not stop us."""
    try:
        return "stager" in toml.read(path).get("tool", {})
    except ConfigError:
        if b"[tool.stager" in path.read_bytes():
            raise
        return False


def _environment(table: Table, root: Path, source: Path) -> EnvironmentConfig:
    own = (PYPROJECT,) if source.name == PYPROJECT else None
    listed = table.take(
        "requirements", own, checks.texts, 'a list of strings, for example ["requirements.txt"]'
    )
    if listed is None and not table.has("requirements"):
        table.problem("requirements", 'missing; name what to install: ["requirements.txt"]')
    config = EnvironmentConfig(
        requirements=listed or (),
        constraints=table.take("constraints", (), checks.texts, "a list of strings"),
        python=table.take(
            "python", None, checks.matching(r"3\.\d+"), 'major.minor in quotes, for example "3.11"'
        ),
        platform=table.take(
            "platform",
            None,
            checks.matching(r"(manylinux|musllinux)_\d+_\d+_\w+"),
            'a Linux platform tag as in wheel names, for example "manylinux_2_28_x86_64"',
        ),
        torch_backend=table.take(
            "torch-backend",
            None,
            checks.torch_backend,
            'the name of one of PyTorch\'s indexes ("cpu", "cu126", "rocm6.4", "xpu"), or "none"',
        ),
        offline_root=table.take("offline-root", None, checks.path(root), "a path"),
        imports=table.take(
            "imports",
            (),
            checks.each(checks.matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")),
            'a list of module names, for example ["torch", "datasets"]',
        ),
    )
    _check_target(table, config)
    return config


def _check_target(table: Table, config: EnvironmentConfig) -> None:
    """Let the target have its say now, so that its complaint is listed with the others."""
    try:
        Target(python=config.python or "3.11", platform=config.platform or "manylinux_2_28_x86_64")
    except ConfigError as exc:
        table.problems.append(exc.message)


def _project(table: Table, root: Path) -> tuple[str, ProjectConfig]:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name).strip("-._") or "project"
    name = table.take(
        "name",
        safe,
        checks.matching(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
        "letters, digits, dot, dash and underscore, a letter or digit first",
    )
    strings = "a list of strings"
    return name, ProjectConfig(
        path=table.take("path", root, checks.path_or_false(root), "a path, or false"),
        exclude=table.take("exclude", (), checks.texts, strings),
        outputs=table.take("outputs", (), checks.texts, strings),
        command=table.take(
            "command", (), checks.texts, 'a list of strings, for example ["train.py", "--epochs"]'
        ),
    )


def _assets(table: Table, root: Path) -> AssetsConfig:
    hub_names = checks.each(checks.matching(r"[\w.-]+(/[\w.-]+)?"))
    names = 'a list of names on the hub, for example ["google/bert_uncased_L-2_H-128_A-2"]'
    return AssetsConfig(
        paths=table.take("paths", (), checks.each(checks.path(root)), "a list of paths"),
        models=table.take("models", (), hub_names, names),
        datasets=table.take("datasets", (), hub_names, names),
    )


def _cluster(table: Table) -> ClusterConfig:
    count = "a whole number, 1 or more"
    return ClusterConfig(
        nodes=table.take("nodes", 1, checks.whole(1), count),
        partition=table.take("partition", None, checks.word, "the name of a partition"),
        cpus_per_task=table.take("cpus-per-task", None, checks.whole(1), count),
        time=table.take(
            "time", None, checks.slurm_time, 'a time limit, for example "00:30:00" or "1-12:00"'
        ),
        account=table.take("account", None, checks.word, "the name of an account"),
        exclude=table.take(
            "exclude", None, checks.node_list, 'nodes, for example "node0[1-3],node07" or a list'
        ),
        salloc_args=table.take(
            "salloc-args", (), checks.texts, "a list of strings, one for each argument"
        ),
        node_root=table.take(
            "node-root",
            "auto",
            checks.node_path,
            'an absolute path, a path that starts with a $VARIABLE of the node, or "auto"',
        ),
    )


def _launch(table: Table) -> LaunchConfig:
    count = 'a whole number, 1 or more, or "auto"'
    return LaunchConfig(
        nproc_per_node=table.take("nproc-per-node", None, checks.whole_or_auto(1), count),
        launcher=table.take(
            "launcher", "torchrun", checks.choice("torchrun", "srun"), '"torchrun" or "srun"'
        ),
        backend=table.take(
            "backend", "auto", checks.choice("auto", "nccl", "gloo"), '"auto", "nccl" or "gloo"'
        ),
        interface=table.take(
            "interface",
            "auto",
            checks.interface,
            '"auto", a name like "ens1f1", or a table { "node0[1-3]" = "ens1f1" }',
        ),
        omp_num_threads=table.take("omp-num-threads", None, checks.whole_or_auto(1), count),
        max_restarts=table.take("max-restarts", 0, checks.whole(0), "a whole number, 0 or more"),
    )
