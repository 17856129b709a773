"""``[project]`` and ``[assets]``: the user's own code, and the data it needs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.launch.program_variables import DROPPED, RANK
from bundle.protocol.enumerations import Backend, Launcher, LogMode, Stage, TransferWay
from bundle.protocol.job import ONE_A_CPU
from bundle.results import patterns

from ..core.errors import ConfigError
from ..core.values import Target
from ..hub.repositories import HubRequest, Kind, parse_request
from . import checks
from .table import Table

_LONGEST_NAME = 100
"""A file's name has 255 bytes; a log's also has the job's id, a node's name and a task's number."""

_OURS = re.compile(rf"PATH$|STAGER_|{DROPPED.pattern}|{RANK.pattern}")
"""Variables that ranks do not get from the settings."""


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """``[project]``: the user's own code."""

    path: Path | None
    """The folder that is shipped; None (``path = false``) ships none."""
    exclude: tuple[str, ...]
    """Patterns of files not to ship, in the form of ``.gitignore``, on top of that file."""
    outputs: tuple[str, ...]
    """Paths below the run directory that are brought back when the job ends."""
    resume_limit: int
    """Most bytes of them that are sent before a job to nodes that do not see that directory."""
    command: tuple[str, ...]
    """The command of every rank if the command line names none."""


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """``[assets]``: models and data, fetched at build time and never later."""

    paths: tuple[Path, ...]
    """Files and folders, absolute, with those that ``env`` names."""
    models: tuple[HubRequest, ...]
    """Models (and their tokenizers) of the hub."""
    datasets: tuple[HubRequest, ...]
    """Data sets of the hub."""
    spaces: tuple[HubRequest, ...] = ()
    """Spaces of the hub, such as the metrics of ``evaluate``."""
    env: tuple[tuple[str, Path], ...] = ()
    """Variables of the ranks, each with the asset that it is the place of."""


def project(table: Table, root: Path) -> tuple[str, ProjectConfig]:
    """Read ``[project]``: the name, and the rest; problems are noted in the table."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name).strip("-._")[:_LONGEST_NAME] or "project"
    name = table.take(
        "name",
        safe,
        checks.matching(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}"),
        f"up to {_LONGEST_NAME} letters, digits, dots, dashes and underscores, a letter or digit "
        "first, since files are named by it",
    )
    strings = "a list of strings"
    own = ProjectConfig(
        path=table.take("path", root, checks.path_or_false(root), "a path, or false", "."),
        exclude=table.take("exclude", (), checks.texts, strings),
        outputs=table.take("outputs", (), checks.texts, strings),
        resume_limit=table.take("resume-limit", 2 * 10**9, checks.size, checks.SIZE, "2GB"),
        command=table.take(
            "command", (), checks.texts, 'a list of strings, for example ["train.py", "--epochs"]'
        ),
    )
    _refuse_outside(table, own.outputs)
    return name, own


def _refuse_outside(table: Table, outputs: tuple[str, ...]) -> None:
    """Report outputs outside the folder that a job runs in: they are not collected."""
    for path in outputs:
        try:
            output(path)
        except ValueError as exc:
            table.problem("outputs", str(exc))


def output(value: object) -> str:
    """Return the path or pattern of an output.

    Raises:
        ValueError: it is none, or lies outside the folder that a job runs in.
    """
    path = checks.text(value)
    if patterns.split(path) is None:
        raise ValueError(f"{path!r} lies outside the folder that a job runs in")
    return path


def assets(table: Table, root: Path) -> AssetsConfig:
    """Read ``[assets]``; problems are noted in the table."""
    paths = table.take("paths", (), checks.each(checks.path(root)), "a list of paths")
    env = table.take(
        "env", (), checks.variables, 'a table of paths, { TIKTOKEN_CACHE_DIR = "caches/tiktoken" }'
    )
    places = []
    for name, value in env:
        try:
            if _OURS.match(name):
                raise ValueError("stager sets this variable itself")
            places.append((name, checks.path(root)(value)))
        except ValueError as exc:
            table.problem(f"env.{name}", str(exc) or f"{value!r} is no path")
    more = (place for _, place in places if not any(map(place.is_relative_to, paths)))
    return AssetsConfig(
        paths=(*paths, *dict.fromkeys(more)),
        env=tuple(places),
        models=_of_hub(table, "models", "model"),
        datasets=_of_hub(table, "datasets", "dataset"),
        spaces=_of_hub(table, "spaces", "space"),
    )


def _of_hub(table: Table, key: str, kind: Kind) -> tuple[HubRequest, ...]:
    allowed = 'a list of names on the hub, for example ["org/name", "org/name@revision"]'
    requests = []
    for number, value in enumerate(table.take(key, (), checks.listed, allowed)):
        try:
            requests.append(parse_request(kind, value))
        except ValueError as exc:
            table.problem(f"{key}[{number}]", f"{exc}; allowed: org/name, org/name@revision, or a "
                          "table with name and more, as docs/models.md says")  # fmt: skip
    return tuple(dict.fromkeys(requests))


# --- ``[environment]``: the requirements of the environment, and the machine it is for -----------

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


# --- ``[cluster]``: the resources to request from Slurm, or the hosts where there is none --------


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """``[cluster]``: the resources to request from Slurm; None leaves an option to Slurm."""

    nodes: tuple[int, int]
    """Fewest and most nodes, 1 or more; equal if the number is fixed."""
    min_nodes: int | None
    """Unusable nodes are left out while this many remain; None: every node must be usable."""
    partition: str | None
    """Slurm partition."""
    cpus_per_task: int | None
    """CPUs for each task, 1 or more."""
    gpus_per_node: str | None
    """GPUs on each node, as Slurm writes it: ``4``, ``a100:4`` or ``v100:4,a100:2``."""
    time: str | None
    """Time limit in one of Slurm's forms: minutes, ``HH:MM:SS``, ``UNLIMITED``..."""
    account: str | None
    """Slurm account that is charged."""
    exclude: str | None
    """Nodes to avoid, as a Slurm node list."""
    nodelist: str | None
    """Nodes that must be among them, as a Slurm node list."""
    qos: str | None
    """Quality of service."""
    constraint: str | None
    """Features that nodes must have, in Slurm's notation."""
    reservation: str | None
    """Slurm reservation."""
    mem: str | None
    """Memory on each node: megabytes, or a number with K, M, G or T; 0 for all."""
    avoid_bad: bool
    """True to avoid nodes that failed in the last days as well."""
    salloc_args: tuple[str, ...]
    """Further options, passed on as they are."""
    hosts: tuple[str, ...]
    """Hosts that are reached over ``ssh`` where there is no Slurm, in its notation."""
    node_root: str
    """Directory on each node under which the node root is made; ``auto`` looks for a local one."""
    stage: Stage
    """The rule by which the bundle is sent to the nodes."""
    transfer: TransferWay
    """The way in which it is sent."""
    log_mode: LogMode
    """The readers of a job's files."""
    container_image: str | None
    """Image that the ranks run in: one for Slurm's pyxis plugin, or one of Apptainer's."""
    container_mounts: tuple[str, ...]
    """``SOURCE:TARGET`` pairs for it, besides the node root."""


def cluster(table: Table) -> ClusterConfig:
    """Read the table; problems are noted in it."""
    count = checks.COUNT
    nodes = table.take("nodes", (1, 1), checks.node_range, f'{count}, or "MIN:MAX" in quotes', 1)
    min_nodes = table.take("min-nodes", None, checks.whole(1), count)
    if min_nodes is not None and min_nodes > nodes[1]:
        table.problem("min-nodes", f"found {min_nodes}, which is more than cluster.nodes")
    return ClusterConfig(
        nodes=nodes,
        min_nodes=min_nodes,
        **_slurm(table, count),
        hosts=table.take(
            "hosts", (), checks.each(checks.word), 'hosts, for example ["node[01-08]", "user@gpu9"]'
        ),
        node_root=table.take(
            "node-root",
            "auto",
            checks.node_path,
            'an absolute path, a path with a $VARIABLE of the node first, "auto" or "auto-memory"',
        ),
        stage=table.take(
            "stage", Stage.AUTO, checks.member_of(Stage), '"auto", "always" or "never"'
        ),
        transfer=table.take(
            "transfer",
            TransferWay.AUTO,
            checks.member_of(TransferWay),
            '"auto", "relay", "sbcast" or "shared"',
        ),
        log_mode=table.take(
            "log-mode", LogMode.PRIVATE, checks.member_of(LogMode), '"private" or "group"'
        ),
        container_image=table.take(
            "container-image", None, checks.word, "the name of an image, or the path of one"
        ),
        container_mounts=table.take(
            "container-mounts",
            (),
            checks.each(checks.mount),
            'a list of mounts, for example ["/scratch:/scratch"]',
        ),
    )


def _slurm(table: Table, count: str) -> dict[str, Any]:
    return {
        "partition": table.take("partition", None, checks.word, "the name of a partition"),
        "cpus_per_task": table.take("cpus-per-task", None, checks.whole(1), count),
        "gpus_per_node": table.take("gpus-per-node", None, checks.gpus, checks.GPUS),
        "time": table.take("time", None, checks.slurm_time, checks.TIME),
        "account": table.take("account", None, checks.word, "the name of an account"),
        "exclude": table.take(
            "exclude", None, checks.node_list, 'nodes, for example "node0[1-3],node07" or a list'
        ),
        "nodelist": table.take(
            "nodelist", None, checks.node_list, 'nodes, for example "node0[1-3]" or a list'
        ),
        "qos": table.take("qos", None, checks.word, "the name of a quality of service"),
        "constraint": table.take(
            "constraint", None, checks.word, 'features of nodes, for example "a100&nvlink"'
        ),
        "reservation": table.take("reservation", None, checks.word, "the name of a reservation"),
        "mem": table.take("mem", None, checks.memory, checks.MEMORY),
        "avoid_bad": table.take("avoid-bad", False, checks.boolean, "true or false"),
        "salloc_args": table.take(
            "salloc-args", (), checks.texts, "a list of strings, one for each argument"
        ),
    }


# --- ``[launch]``: the settings for starting ranks -----------------------------------------------

GRACE_SECONDS = 7
"""Short, since Slurm kills remaining processes KillWait (30 s by default) after it ended a job."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """``[launch]``: the settings for starting ranks."""

    nproc_per_node: int | None
    """Ranks on each node; None for one a GPU, else 1; ``ONE_A_CPU``."""
    launcher: Launcher
    """The program that starts the ranks."""
    backend: Backend
    """The backend of torch.distributed."""
    interface: str | tuple[tuple[str, str], ...]
    """``auto``, one interface's name, or pairs of a node pattern and an interface's name."""
    omp_num_threads: int | None
    """Threads a rank, 1 or more; None for the task's CPUs divided by its ranks."""
    max_restarts: int
    """Number of times torchrun restarts a failed group of ranks, 0 or more."""
    grace_seconds: int
    """Grace period of ranks after SIGTERM, in seconds, 1 or more."""
    pass_env: tuple[str, ...]
    """Names of secret variables that ranks get; others that look like secrets are not passed on."""
    on_failure: tuple[str, ...]
    """The command that gets the verdict of a job that failed, and its arguments; empty for none."""


def ranks_on_node(nproc: int | str, backend: Backend) -> dict[str, Any]:
    """Return the fields of a :class:`LaunchConfig` for a number or one of torchrun's words.

    Where the backend is not chosen, ``gpu`` asks for a GPU on each node, and ``cpu`` for none.
    """
    known: dict[str, tuple[int | None, Backend]] = {
        "auto": (None, backend),
        "gpu": (None, Backend.NCCL),
        "cpu": (ONE_A_CPU, Backend.GLOO),
    }
    number, own = known[nproc] if isinstance(nproc, str) else (nproc, backend)
    return {
        "nproc_per_node": number,
        "backend": own if backend is Backend.AUTO else backend,
    }


def launch(table: Table) -> LaunchConfig:
    """Read the table; problems are noted in it."""
    count = f'{checks.COUNT}, or "auto"'
    nproc = table.take("nproc-per-node", "auto", checks.ranks, checks.RANKS)
    launcher = table.take(
        "launcher",
        Launcher.TORCHRUN,
        checks.member_of(Launcher),
        '"torchrun", "srun" or "processes"',
    )
    backend = table.take(
        "backend", Backend.AUTO, checks.member_of(Backend), '"auto", "nccl" or "gloo"'
    )
    return LaunchConfig(
        **ranks_on_node(nproc, backend),
        launcher=launcher,
        interface=table.take(
            "interface",
            "auto",
            checks.interface,
            '"auto", a name like "ens1f1", or a table { "node0[1-3]" = "ens1f1" }',
        ),
        omp_num_threads=table.take("omp-num-threads", None, checks.whole_or_auto(1), count, "auto"),
        max_restarts=table.take(
            "max-restarts", 0, checks.whole(0), f"a whole number from 0 to {checks.MOST}"
        ),
        grace_seconds=table.take("grace-seconds", GRACE_SECONDS, checks.whole(1), checks.COUNT),
        pass_env=table.take(
            "pass-env",
            (),
            checks.each(checks.matching(checks.VARIABLE)),
            'a list of names of variables, without their values: ["HF_TOKEN"]',
        ),
        on_failure=table.take("on-failure", (), checks.command, checks.COMMAND),
    )


# --- ``[trust]``: whose signature a bundle must have before anything of it runs ------------------


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """``[trust]``: whose signature a bundle must have before anything of it runs."""

    allowed_signers: Path | None = None
    """The file with the keys that may sign, as ``ssh-keygen(1)`` describes it; None for none."""
    require: bool = False
    """True to refuse a bundle that none of them has signed."""


def trust(table: Table, root: Path) -> TrustConfig:
    """Read the table; problems are noted in it."""
    config = TrustConfig(
        allowed_signers=table.take(
            "allowed-signers", None, checks.path(root), "a path, as of an allowed_signers file"
        ),
        require=table.take("require", False, checks.boolean, "true or false"),
    )
    if config.require and config.allowed_signers is None and not table.has("allowed-signers"):
        table.problem("require", "true needs allowed-signers, the file with the keys that may sign")
    return config


# --- Experiment trackers that write to the run directory where there is no network ---------------

_FOLDERS = {
    "wandb": ("wandb",),
    "mlflow": ("mlruns", "mlflow.db"),
    "mlflow-skinny": ("mlruns", "mlflow.db"),
    "tensorboard": ("runs",),
    "tensorboardx": ("runs",),
}
"""By package, the names that it gives its results by default."""


def tracker_outputs(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the names that trackers give their results, of those among some packages."""
    present = {*packages}
    names = [name for package, names in _FOLDERS.items() if package in present for name in names]
    return tuple(dict.fromkeys(names))
