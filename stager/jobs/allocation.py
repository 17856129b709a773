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
_LOOPBACK = re.compile(r"localhost(\..*)?|127(\.\d+){3}|::1", re.IGNORECASE)


class Hosts(NamedTuple):
    """The hosts that a job may use."""

    names: tuple[str, ...]
    """Their names, with ``user@`` where it is another user; the first one is the head."""
    origin: str
    """The place that names them: ``--hosts``, ``$PBS_NODEFILE``, ``[cluster] hosts``."""


def find_hosts(options: JobOptions, config: Config, env: Mapping[str, str]) -> Hosts | None:
    """Return the hosts that are named; None if none are.

    An option counts more than the job that this runs in, and that more than the settings.
    """
    if options.hosts and options.host_file:
        raise ConfigError(
            "--hosts and --host-file both name the hosts", hint="leave one of the two out"
        )
    if options.hosts or options.host_file:
        config.refuse_fixed(["cluster.hosts"])
    variable = next(filter(env.get, _NODE_FILES), "")  # of the PBS, LSF or OAR job that this is in
    if options.hosts:
        found = Hosts(_expand_unique(options.hosts, "--hosts"), "--hosts")
    elif options.host_file:
        found = _read_host_file(options.host_file, f"--host-file {options.host_file}")
    elif variable:
        found = _read_host_file(Path(env[variable]), f"${variable} ({env[variable]})")
        found = found._replace(origin=f"${variable}")
    elif config.cluster.hosts:
        origin = "[cluster] hosts"
        found = Hosts(_expand_unique(config.cluster.hosts, origin), origin)
    else:
        return None
    excluded = join_nodes(config.cluster.exclude, options.exclude)
    return _exclude_hosts(found, excluded) if excluded else found


def _expand_unique(texts: Iterable[str], origin: str) -> tuple[str, ...]:
    names = _expand(texts, origin)
    seen: dict[str, str] = {}
    for name in names:
        key = _get_machine(name)
        if key in seen:
            twice = name if seen[key] == name else f"{seen[key]} and {name}"
            raise ConfigError(
                f"{origin}: the same host twice: {twice}",
                hint="name each host once; the number of ranks on it is --nproc-per-node",
            )
        seen[key] = name
    return names


def _read_host_file(path: Path, origin: str) -> Hosts:
    """Return the hosts of a file, each once: such files may have a line for each slot."""
    names: list[str] = []
    for number, line in enumerate(_read_lines(path, origin), 1):
        words = line.partition("#")[0].split()
        odd = [word for word in words[1:] if not _SLOTS.fullmatch(word)]
        if odd:
            raise ConfigError(
                f"{origin}: line {number}: there is {odd[0]!r} behind the host",
                hint="give each host a line of its own, with nothing but slots=N behind it",
            )
        names += _expand(words[:1], f"{origin}: line {number}")
    if not names:
        raise ConfigError(
            f"{origin}: it names no host", hint="give it one host in each line, or leave it out"
        )
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_get_machine(name), name)
    return Hosts(_check_names(tuple(first.values()), origin), origin)


def _read_lines(path: Path, origin: str) -> list[str]:
    """Read a file, which may be a pipe: ``--host-file <(squeue ...)``."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        lines = data.decode("utf-8-sig").splitlines()
    except OSError as exc:
        why = str(exc.strerror or exc)
    except UnicodeDecodeError:
        why = "it is not a text"
    else:
        if len(data) <= _MOST_BYTES and len(max(lines, key=len, default="")) <= _LONGEST_LINE:
            return lines
        why = "it is too long for a list of hosts"
    raise ConfigError(
        f"{origin}: the file cannot be read: {why}",
        hint="give the path of a file with one host in each line",
    )


def _expand(texts: Iterable[str], origin: str) -> tuple[str, ...]:
    names: list[str] = []
    for text in texts:
        try:
            names += expand_hostlist(text)
        except NodeError as exc:
            raise ConfigError(f"{origin}: {text}: {exc.problem.why}", hint=_HOW) from exc
    return _check_names(tuple(names), origin)


def _check_names(names: tuple[str, ...], origin: str) -> tuple[str, ...]:
    wrong = find_invalid_hosts(names)
    if wrong:
        has_port = re.fullmatch(r"[^:]+:\d+", wrong[0])
        raise ConfigError(
            f"{origin}: {wrong[0]!r} cannot be the name of a host",
            hint="a port belongs into ~/.ssh/config (Host, Port)" if has_port else _HOW,
        )
    loopback = [name for name in names if _LOOPBACK.fullmatch(_get_machine(name))]
    if loopback and len(names) > 1:
        raise ConfigError(
            f"{origin}: {loopback[0]} is a name of this machine that no other host can use",
            hint="write the name under which the other hosts reach it",
        )
    return names


def _get_machine(name: str) -> str:
    return name.rpartition("@")[2].lower()


def _exclude_hosts(hosts: Hosts, excluded: str) -> Hosts:
    avoided = {_get_machine(name) for name in _expand([excluded], "exclude")}
    left = tuple(name for name in hosts.names if _get_machine(name) not in avoided)
    if not left:
        raise ConfigError(
            f"{hosts.origin}: all hosts are excluded", hint="leave fewer out with --exclude"
        )
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
        raise ConfigError(
            f"job {job}, in which this runs, is another allocation than the options ask for",
            hint="leave them out to use this allocation, submit a new one with --batch, or start "
            "from a login node",
            context=wrong,
        )
    if ignored:
        yield f"no effect in job {job}, which stands already: {', '.join(ignored)}"
