"""The options of Slurm that a job without an allocation of its own cannot have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bundle.protocol.enumerations import Allocation
from bundle.system.hostlist import expand_hostlist

from ..core.errors import ConfigError
from .job_options import JobOptions

_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}
_NODES = "SLURM_JOB_NODELIST"


@dataclass(frozen=True, kw_only=True)
class _Known:
    option: str
    """The option."""
    variable: str
    """The variable that Slurm sets in the allocation."""
    same: Callable[[str, str], bool]
    """Whether an option's value, the first, fits the variable's."""


def _equal(asked: str, there: str) -> bool:
    return asked in there.split(",")


def _same_memory(asked: str, there: str) -> bool:
    return _megabytes(asked) == _megabytes(there)


def _megabytes(text: str) -> float:
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.upper())
    return int(match[1]) * _UNITS[match[2]] if match else -1


def _all_in(asked: str, there: str) -> bool:
    return {*expand_hostlist(asked)} <= {*expand_hostlist(there)}


def _none_in(asked: str, there: str) -> bool:
    return not {*expand_hostlist(asked)} & {*expand_hostlist(there)}


_KNOWN = {
    "partition": _Known(option="--partition", variable="SLURM_JOB_PARTITION", same=_equal),
    "account": _Known(option="--account", variable="SLURM_JOB_ACCOUNT", same=_equal),
    "qos": _Known(option="--qos", variable="SLURM_JOB_QOS", same=_equal),
    "reservation": _Known(option="--reservation", variable="SLURM_JOB_RESERVATION", same=_equal),
    "gpus_per_node": _Known(option="--gpus-per-node", variable="SLURM_GPUS_PER_NODE", same=_equal),
    "mem": _Known(option="--mem", variable="SLURM_MEM_PER_NODE", same=_same_memory),
    "nodelist": _Known(option="--nodelist", variable=_NODES, same=_all_in),
    "exclude": _Known(option="--exclude", variable=_NODES, same=_none_in),
}
_UNKNOWN = {
    "time": "--time",
    "constraint": "--constraint",
    "salloc_args": "--salloc-arg",
}
"""Options of which nothing in the allocation tells the value."""


def ignored_elsewhere(options: JobOptions, where: Allocation) -> Iterator[str]:
    """Yield a note about the options of Slurm, where nodes come from somewhere else."""
    names = {key: known.option for key, known in _KNOWN.items()} | _UNKNOWN
    if where == Allocation.SSH:
        del names["exclude"]  # which leaves hosts out, too
    given = [name for key, name in names.items() if getattr(options, key)]
    if given:
        yield f"no effect with --allocation {where}: {', '.join(given)}"


def without_effect(options: JobOptions, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a note about the options that have no effect in this allocation.

    Raises:
        ConfigError: options that contradict the allocation; all of them are named.
    """
    wrong, ignored = [], [name for key, name in _UNKNOWN.items() if getattr(options, key)]
    for key, known in _KNOWN.items():
        asked = getattr(options, key)
        if not asked:
            continue
        there = env.get(known.variable, "")
        if not there:
            ignored.append(known.option)
        elif not known.same(asked, there):
            wrong.append(f"{known.option} {asked}: this allocation has {there} ({known.variable})")
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
