"""The nodes of a job without an allocation of its own: hosts, and refused options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bundle.protocol.enumerations import Allocation
from bundle.protocol.problem import NodeError
from bundle.system.hostlist import expand_hostlist, find_invalid_hosts

from ..config.job_settings import JobOptions, SettingRow, SlurmOptions, join_nodes, list_rows
from ..config.load import Config
from ..core.errors import ConfigError

_NODE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE")
"""Variables with the path of a file that has a line for each slot of a job of PBS, LSF or OAR."""
_SLOTS = re.compile(r"(max[-_]?)?(slots|cpus?|ncpus)=\d+", re.IGNORECASE)
"""What MPI's host files have behind a name."""
_MOST_BYTES = 16 << 20  # bytes of a file of hosts; a line for each slot of 65,536 hosts has fewer
_LONGEST_LINE = 1 << 16
_HOW = "write them as in node[01-08],user@gpu9"


class Hosts(NamedTuple):
    """The hosts that a job may use."""

    names: tuple[str, ...]  # with ``user@`` where it is another user; the first one is the head
    origin: str  # what names them: ``--hosts``, ``$PBS_NODEFILE``, ``[cluster] hosts``


def find_hosts(options: JobOptions, config: Config, env: Mapping[str, str]) -> Hosts | None:
    """Return the hosts that are named; None if none are.

    An option counts more than the job that this runs in, and that more than the settings.
    """
    if options.hosts and options.host_file:
        both = "--hosts and --host-file both name the hosts"
        raise ConfigError(both, hint="leave one of the two out")
    if options.hosts or options.host_file:
        config.refuse_fixed(["cluster.hosts"])
    variable = next(filter(env.get, _NODE_FILES), "")  # of the PBS, LSF or OAR job that this is in
    if options.host_file:
        names = _read_host_file(options.host_file, origin := f"--host-file {options.host_file}")
    elif variable and not options.hosts:
        names = _read_host_file(Path(env[variable]), f"${variable} ({env[variable]})")
        origin = f"${variable}"
    else:
        in_settings = ("[cluster] hosts", config.cluster.hosts)
        origin, texts = ("--hosts", options.hosts) if options.hosts else in_settings
        names = _expand_unique(texts, origin)
    excluded = join_nodes(config.cluster.exclude, options.exclude)
    return _exclude_hosts(Hosts(names, origin), excluded) if names else None


def _expand_unique(texts: Iterable[str], origin: str) -> tuple[str, ...]:
    names = _expand(texts, origin)
    seen: dict[str, str] = {}
    for name in names:
        key = _get_machine(name)
        if key in seen:
            twice = name if seen[key] == name else f"{seen[key]} and {name}"
            hint = "name each host once; the number of ranks on it is --nproc-per-node"
            raise ConfigError(f"{origin}: the same host twice: {twice}", hint=hint)
        seen[key] = name
    return names


def _read_host_file(path: Path, origin: str) -> tuple[str, ...]:
    """Return the hosts of a file, each once: such files may have a line for each slot."""
    names: list[str] = []
    for number, line in enumerate(_read_lines(path, origin), 1):
        words = line.partition("#")[0].split()
        if odd := [word for word in words[1:] if not _SLOTS.fullmatch(word)]:
            raise ConfigError(
                f"{origin}: line {number}: there is {odd[0]!r} behind the host",
                hint="give each host a line of its own, with nothing but slots=N behind it",
            )
        names += _expand(words[:1], f"{origin}: line {number}")
    if not names:
        hint = "give it one host in each line, or leave it out"
        raise ConfigError(f"{origin}: it names no host", hint=hint)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_get_machine(name), name)
    return tuple(first.values())


def _read_lines(path: Path, origin: str) -> list[str]:
    """Read a file, which may be a pipe: ``--host-file <(squeue ...)``."""
    why = "it is no text, or too long for a list of hosts"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        lines = data.decode("utf-8-sig").splitlines()
        if len(data) <= _MOST_BYTES and len(max(lines, key=len, default="")) <= _LONGEST_LINE:
            return lines
    except OSError as exc:
        why = str(exc.strerror or exc)
    except UnicodeDecodeError:
        pass
    hint = "give the path of a file with one host in each line"
    raise ConfigError(f"{origin}: the file cannot be read: {why}", hint=hint)


def _expand(texts: Iterable[str], origin: str) -> tuple[str, ...]:
    names: list[str] = []
    for text in texts:
        try:
            names += expand_hostlist(text)
        except NodeError as exc:
            raise ConfigError(f"{origin}: {text}: {exc.problem.why}", hint=_HOW) from exc
    if wrong := find_invalid_hosts(names):
        has_port = re.fullmatch(r"[^:]+:\d+", wrong[0])
        hint = "a port belongs into ~/.ssh/config (Host, Port)" if has_port else _HOW
        raise ConfigError(f"{origin}: {wrong[0]!r} cannot be the name of a host", hint=hint)
    return tuple(names)


def _get_machine(name: str) -> str:
    return name.rpartition("@")[2].lower()


def _exclude_hosts(hosts: Hosts, excluded: str | None) -> Hosts:
    avoided = {_get_machine(name) for name in _expand(filter(None, [excluded]), "exclude")}
    left = tuple(name for name in hosts.names if _get_machine(name) not in avoided)
    if not left:
        hint = "leave fewer out with --exclude"
        raise ConfigError(f"{hosts.origin}: all hosts are excluded", hint=hint)
    return hosts._replace(names=left)


# --- The options of Slurm that a job without an allocation of its own cannot have ----------------

_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}
_USED = ("nodes", "cpus_per_task")  # options that a job keeps to within what its allocation has


def _is_within(name: str, asked: str, there: str) -> bool:
    if name == "mem":
        return _read_megabytes(asked) == _read_megabytes(there)
    if name == "nodelist":
        return {*expand_hostlist(asked)} <= {*expand_hostlist(there)}
    if name == "exclude":
        return {*expand_hostlist(asked)}.isdisjoint(expand_hostlist(there))
    return asked in there.split(",")


def _read_megabytes(text: str) -> float:
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.upper())
    return int(match[1]) * _UNITS[match[2]] if match else -1


def _list_given_rows(options: JobOptions, *left_out: str) -> dict[str, SettingRow]:
    return {
        name: row
        for name, row in list_rows(SlurmOptions).items()
        if name not in (*_USED, *left_out) and getattr(options, name)
    }


def list_options_without_slurm(options: JobOptions, where: Allocation) -> Iterator[str]:
    """Yield a note about the options of Slurm, where nodes come from somewhere else."""
    # Over ssh, --exclude leaves hosts out.
    given = _list_given_rows(options, *(["exclude"] if where == Allocation.SSH else []))
    if given:
        names = ", ".join(row.option for row in given.values())
        yield f"no effect with --allocation {where}: {names}"


def check_options_inside(options: JobOptions, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a note about the options that have no effect here; refuse those that contradict."""
    wrong, ignored = [], []
    for name, row in _list_given_rows(options).items():
        asked, there = getattr(options, name), env.get(row.variable, "")
        if not there:
            ignored.append(row.option)
        elif not _is_within(name, asked, there):
            wrong.append(f"{row.option} {asked}: this allocation has {there} ({row.variable})")
    job = env.get("SLURM_JOB_ID", "")
    if wrong:
        what = f"job {job}, in which this runs, is another allocation than the options ask for"
        hint = "leave them out, submit a new job with --batch, or start from a login node"
        raise ConfigError(what, hint=hint, context=wrong)
    if ignored:
        yield f"no effect in job {job}, which stands already: {', '.join(ignored)}"
