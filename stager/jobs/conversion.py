"""Conversion of a command for one machine into the settings of a job on several."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from bundle.protocol.enumerations import Backend
from bundle.regex import compile_lazily

from ..config import checks
from ..core.errors import ConfigError

# torchrun: ``torch/distributed/run.py`` of torch 2.13; accelerate: ``commands/launch.py`` of 1.15;
# uv: ``uv run --help`` of 0.13. Options of accelerate that configure the training itself (FSDP...)
# are left unknown: they must not be dropped silently.


class Option(NamedTuple):
    """An option of a launcher, and its meaning for a job."""

    takes_value: bool = False
    dropped: str = ""  # the reason why it is left out of the job; empty where it is used
    refused: str = ""  # the reason why the whole command cannot be converted; empty where it can
    short: str = ""


def _read_options(
    program: str, table: Mapping[str, Option], words: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Split a launcher's arguments into its options, with their values, and what it launches."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        shown = word.partition("=")[0] if word.startswith("--") else word[:2]
        name = _find_option(program, table, shown)
        given[name] = _read_value(f"{program} --{name}", table[name], word, rest)
    if not rest:
        raise ConfigError(f"{program}: the script is missing", hint=EXAMPLE)
    return given, rest


def _read_value(shown: str, option: Option, word: str, rest: list[str]) -> str:
    if option.refused:
        raise ConfigError(f"{shown}: {option.refused}")
    is_long = word.startswith("--")
    end = word.partition("=")[2] if is_long else word[2:].removeprefix("=")
    has_end = "=" in word if is_long else bool(end)
    if not option.takes_value:
        if has_end and is_long:
            raise ConfigError(f"{shown}: this option takes no value")
        rest[:0] = [f"-{end}"] if has_end else []  # several in one word, as in -qv
        return ""
    return _take_value(shown, option, end if has_end else None, rest)


def _take_value(shown: str, option: Option, end: str | None, rest: list[str]) -> str:
    """Return the end of the option's own word, or else the next word."""
    if end is None and (not rest or rest[0].startswith("-")):
        wrong = "its value is missing"
    elif (value := rest.pop(0) if end is None else end).endswith(".py"):
        wrong = f"{value} is not a value, it looks like the script"
    else:
        return value
    empty = "a variable is probably empty here, and the next word takes its place"
    out = "leave the option out" + (f": {option.dropped}" if option.dropped else "")
    raise ConfigError(f"{shown}: {wrong}", hint=f"{empty}; {out}")


def _find_option(program: str, table: Mapping[str, Option], shown: str) -> str:
    """Return the name of an option; its beginning is enough, except for accelerate."""
    if not shown.startswith("--"):
        fits = [name for name, option in table.items() if option.short == shown[1:]]
    elif (text := shown[2:].replace("_", "-")) in table:
        fits = [text]
    else:
        fits = [name for name in table if name.startswith(text) and program != ACCELERATE_LAUNCH]
    if len(fits) != 1:
        what = f"{program} {shown}: not an option that can be carried over"
        raise ConfigError(what, hint=_advise(program, shown, table))
    return fits[0]


def _list_dropped_options(
    program: str, table: Mapping[str, Option], given: Mapping[str, str]
) -> list[str]:
    return [
        f"{program} --{name} is left out: {table[name].dropped}"
        for name in given
        if table[name].dropped
    ]


def _is_unexpanded(text: str) -> bool:
    # A shell within a job was to fill it in: ``$SLURM_NNODES``.
    return not text or text.startswith("$")


def _advise(program: str, shown: str, table: Collection[str]) -> str:
    near = difflib.get_close_matches(shown[2:].replace("_", "-"), table, n=1, cutoff=_NEAR)
    if near:
        return f"did you mean --{near[0]}?"
    if program == ACCELERATE_LAUNCH:
        return f"leave it out; {_AS_VARIABLE}, as --use_fsdp in ACCELERATE_USE_FSDP=true"
    return "leave it out, or name only the script: stager run -- train.py ..."


ACCELERATE_LAUNCH = "accelerate launch"
_AS_VARIABLE = "options of the training reach the script in variables, set before stager runs"
EXAMPLE = "name a script or a module: stager run -- train.py --epochs 3, or -- -m package.train"

_NEAR = 0.8  # how alike an option and a known one must be; ``--use_fsdp`` is not ``--use_cpu``

_RENDEZVOUS = "the job's own nodes, port and id are used"
_LOGS = "every rank has a log of its own in the log directory"
_NO_PYTHON = "ranks are Python programs, started by the environment's own interpreter"
_SET_BY_STAGER = "stager sets it itself where it starts torchrun on each node"
_BIND = "bind through Slurm, with [cluster] salloc-args"


def _values(names: str, why: str = "", *, takes_value: bool = True) -> dict[str, Option]:
    """Return options with a value, which are dropped if there is a reason; ``tee/t`` is short."""
    option = Option(takes_value, dropped=why)
    pairs = (name.partition("/") for name in names.split())
    return {name: option._replace(short=short) for name, _, short in pairs}


_flags = partial(_values, takes_value=False)


TORCHRUN: dict[str, Option] = {
    **_flags("use-env"),  # of ``torch.distributed.launch``
    **_values("nnodes nproc-per-node max-restarts"),
    **_flags("module/m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_flags("standalone", "stager sets where the ranks meet"),
    **_values("rdzv-backend rdzv-endpoint rdzv-id rdzv-conf master-addr local-addr", _RENDEZVOUS),
    **_values("node-rank master-port", _RENDEZVOUS),
    **_values("log-dir logs-specs duplicate-stdout-filters duplicate-stderr-filters", _LOGS),
    **_values("local-ranks-filter redirects/r tee/t", _LOGS),
    **_flags("run-path", "the wrapper runs the script in its own interpreter anyway"),
    **_values("event-log-handler role signals-to-handle start-method", _SET_BY_STAGER),
    **_values("monitor-interval shutdown-timeout", _SET_BY_STAGER),
    **_values("numa-binding", _BIND),
    **_flags("virtual-local-rank", "each rank finds its GPU by LOCAL_RANK"),
}

ACCELERATE: dict[str, Option] = {
    **_values("num-processes num-machines max-restarts mixed-precision dynamo-backend"),
    **_flags("multi-gpu cpu use-cpu module/m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_values("main-process-ip main-process-port machine-rank", _RENDEZVOUS),
    **_values("rdzv-backend rdzv-conf", _RENDEZVOUS),
    **_flags("same-network", _RENDEZVOUS),
    **_values("log-dir tee/t", _LOGS),
    **_values("role monitor-interval", _SET_BY_STAGER),
    **_values("gpu-ids", "Slurm decides which GPUs a job gets"),
    **_values("num-cpu-threads-per-process", "set it with [launch] omp-num-threads"),
    **_flags("enable-cpu-affinity", _BIND),
    **_flags("quiet/q", "stager run -q is quiet"),
    **_flags("debug", "set ACCELERATE_DEBUG_MODE=true before stager runs"),
    "config-file": Option(
        True, refused="its settings cannot be carried over; give them as options"
    ),
}

_BUNDLE = "the environment comes from the bundle"

UV_RUN: dict[str, Option] = {  # those in common use; others are refused by name
    **_flags("module/m script/s gui-script"),
    **_values("with/w", "name the package in [environment] requirements and build"),
    **_values("python/p", f"{_BUNDLE}; see [environment] python"),
    **_values("extra no-extra group no-group only-group env-file with-editable package", _BUNDLE),
    **_values("with-requirements index default-index index-url/i extra-index-url", _BUNDLE),
    **_values("find-links/f upgrade-package/P resolution prerelease exclude-newer", _BUNDLE),
    **_values("link-mode cache-dir project config-file color", _BUNDLE),
    "directory": Option(
        True, refused="ranks run where stager is called from; change to that directory first"
    ),
    **_flags("all-extras no-dev dev only-dev no-default-groups all-groups no-editable", _BUNDLE),
    **_flags("exact no-env-file isolated active no-sync locked frozen all-packages", _BUNDLE),
    **_flags("no-project no-index no-sources reinstall compile-bytecode refresh", _BUNDLE),
    **_flags("managed-python no-managed-python offline native-tls no-progress no-config", _BUNDLE),
    **_flags("upgrade/U no-cache/n quiet/q verbose/v", _BUNDLE),
}

_PYTHON_OPTIONS = compile_lazily(r"-([bBdEiIOPqRsSuvx]*)(?:([mWX])(.*))?", re.DOTALL)
"""One-letter options of Python: those without a value, and one with a value."""

_ALONE = "name the script or module alone"
_RANKS = f"{_ALONE}; --nodes and --nproc-per-node say how many ranks stager starts"
_PYTHON_STARTS = f"{_ALONE}; the environment's own Python starts each rank"

_REFUSED = {
    "mpirun mpiexec orterun prun prterun jsrun lrun aprun ibrun flux srun deepspeed": _RANKS,
    "horovodrun colossalai torchx composer fabric lightning ray pdsh clush ezpz-launch": _RANKS,
    "-m ezpz.launch -m ezpz.cli.launch -m composer.cli.launcher": _RANKS,
    "-m deepspeed.launcher.runner -m deepspeed.launcher.launch": _RANKS,
    "-m horovod.runner.launch -m torch.distributed.launcher": _RANKS,
    "sbatch salloc qsub bsub oarsub": f"{_ALONE}; --batch submits a batch job",
    "litgpt llamafactory-cli axolotl tune xtuner swift": f"{_ALONE} (-m litgpt)",
    "apptainer singularity docker podman enroot shifter sarus ch-run": (
        f"{_ALONE}; --container-image IMAGE starts the ranks in an image"
    ),
    "numactl taskset hwloc-bind likwid-pin": f"{_ALONE}; {_BIND}",
    "nohup setsid screen tmux nice ionice timeout": f"{_ALONE}; start stager itself by it",
    "time stdbuf unbuffer strace gdb xvfb-run sudo xargs parallel": _PYTHON_STARTS,
    "nsys ncu rocprof py-spy scalene memray coverage ipython pytest": _PYTHON_STARTS,
    "conda mamba micromamba pixi poetry pdm hatch pipenv rye uvx": _PYTHON_STARTS,
    "bash sh zsh dash ksh csh tcsh fish exec eval source . cd export ssh": _PYTHON_STARTS,
    "torchrun accelerate accelerate-launch uv env": _PYTHON_STARTS,
    "-m mpi4py -m mpi4py.run -m debugpy -m pdb -m cProfile": _PYTHON_STARTS,
}
_PROGRAMS = {
    name: why for names, why in _REFUSED.items() for name in re.findall(r"(?:-m )?\S+", names)
}
_PYTHON = compile_lazily(r"(python|pypy)(w|\d(\.\d+)?t?)?")


def _is_python(program: str) -> bool:
    return _PYTHON.fullmatch(program) is not None


def _refuse_program(command: Sequence[str]) -> None:
    is_module = command[0] == "-m" and len(command) > 1
    name = f"-m {command[1]}" if is_module else command[0].rpartition("/")[2]
    why = _PYTHON_STARTS if _is_python(name) else _PROGRAMS.get(name)
    if why is not None:
        raise ConfigError(f"{name} cannot be converted: {why}", hint=EXAMPLE)


# ``python -m torch.distributed.run --nproc_per_node=8 train.py``, ``torchrun``, ``uv run``,
# ``accelerate launch``: each names the script, the ranks of a machine, and much about that machine
# which a job decides by itself. A note names each option that is left out.

_ASSIGNMENT = compile_lazily(r"([A-Za-z_]\w*)=")
_OLD_TORCHRUN = "torch.distributed.launch"
_MOST_DIGITS = len(str(checks.MOST))
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    _OLD_TORCHRUN: _OLD_TORCHRUN,
    "accelerate.commands.launch": "accelerate-launch",
}


class Converted(NamedTuple):
    """The settings of a job that a command gives; None for those it leaves open."""

    command: tuple[str, ...]
    nproc_per_node: int | str | None = None  # or ``auto``, ``gpu``, ``cpu``
    nnodes: tuple[int, int] | None = None  # fewest and most; None for one, too
    max_restarts: int | None = None
    backend: Backend | None = None
    notes: tuple[str, ...] = ()  # a line for each option left out, without values of variables


def convert(command: Sequence[str]) -> Converted:
    """Return what a launcher would run, and how."""
    if any(word.endswith("\r") for word in command):
        raise ConfigError(
            "the command ends in a carriage return: its file has the line ends of Windows",
            hint="remove them: sed -i 's/\\r$//' FILE",
        )
    words, notes = _strip_variables(command)
    if words and PurePath(words[0]).name == "uv":
        before, rest = _read_options("uv", UV_RUN, words[1:])
        if rest[0] != "run":
            raise ConfigError("uv: only `uv run` starts a program", hint=EXAMPLE)
        given, rest = _read_options("uv run", UV_RUN, rest[1:])
        words = list(_join_script(given, rest))
        notes += _list_dropped_options("uv run", UV_RUN, {**before, **given})
    if words and _is_python(PurePath(words[0]).name):
        words, more = _strip_python(words)
        notes += more
    if not words:
        raise ConfigError("there is nothing to run", hint=EXAMPLE)
    converted = _convert_launcher(words)
    _refuse_program(converted.command)
    return converted._replace(notes=(*notes, *converted.notes))


def _convert_launcher(words: list[str]) -> Converted:
    program, arguments = PurePath(words[0]).name, words[1:]
    if words[0] == "-m":
        if not arguments:
            raise ConfigError("-m: the name of the module is missing", hint=EXAMPLE)
        program, arguments = _LAUNCHER_MODULES.get(arguments[0], program), arguments[1:]
    if program == "accelerate":
        if arguments[:1] != ["launch"]:
            raise ConfigError("accelerate: only `accelerate launch` starts ranks", hint=EXAMPLE)
        program, arguments = "accelerate-launch", arguments[1:]
    if program in ("torchrun", _OLD_TORCHRUN):
        return _convert_torchrun(program, arguments)
    if program == "accelerate-launch":
        return _convert_accelerate(arguments)
    if words[0].startswith("-") and words[0] != "-m":
        why = "what follows the two dashes replaces project.command"
        raise ConfigError(f"{words[0]} is not a script; {why}", hint=EXAMPLE)
    return Converted(command=tuple(words))


def _convert_torchrun(program: str, arguments: Sequence[str]) -> Converted:
    given, rest = _read_options(program, TORCHRUN, arguments)
    notes = _list_dropped_options(program, TORCHRUN, given)
    if program == _OLD_TORCHRUN and "use-env" not in given:
        notes.append(f"{program} would add --local-rank=N; here a rank reads LOCAL_RANK")
    return Converted(
        command=_join_script(given, rest),
        nproc_per_node=_read_nproc(program, given.get("nproc-per-node"), notes),
        nnodes=_read_nnodes(program, "nnodes", given.get("nnodes", "1"), notes),
        max_restarts=_read_number(program, "max-restarts", given.get("max-restarts"), 0),
        notes=tuple(notes),
    )


def _convert_accelerate(arguments: Sequence[str]) -> Converted:
    program = ACCELERATE_LAUNCH
    given, rest = _read_options(program, ACCELERATE, arguments)
    notes = _list_dropped_options(program, ACCELERATE, given)
    _refuse_accelerate_variables(given)
    backend = Backend.NCCL if "multi-gpu" in given else None
    if "cpu" in given or "use-cpu" in given:
        backend = Backend.GLOO
        notes.append(f"{program} --cpu: on nodes with GPUs set ACCELERATE_USE_CPU=true, too")
    nnodes = _read_nnodes(program, "num-machines", given.get("num-machines", "1"), notes)
    return Converted(
        command=_join_script(given, rest),
        nproc_per_node=_divide_processes(given, nnodes[1] if nnodes else 1),
        nnodes=nnodes,
        max_restarts=_read_number(program, "max-restarts", given.get("max-restarts"), 0),
        backend=backend,
        notes=tuple(notes),
    )


def _refuse_accelerate_variables(given: Mapping[str, str]) -> None:
    for name in ("mixed-precision", "dynamo-backend"):
        value, variable = given.get(name, "no"), f"ACCELERATE_{name.upper().replace('-', '_')}"
        if value != "no":
            raise ConfigError(
                f"{ACCELERATE_LAUNCH} --{name} {value}: it cannot be part of a command",
                hint=f"leave it out; {_AS_VARIABLE}: {variable}={value}",
            )


def _divide_processes(given: Mapping[str, str], machines: int) -> int | None:
    total = _read_number(ACCELERATE_LAUNCH, "num-processes", given.get("num-processes"), 0)
    if total is None:
        return None
    if total < 1 or total % machines:
        what = f"--num-processes {total}: not a multiple of --num-machines {machines}"
        hint = "accelerate counts the processes of all machines together"
        raise ConfigError(f"{ACCELERATE_LAUNCH} {what}", hint=hint)
    return total // machines


def _join_script(given: Mapping[str, str], rest: Sequence[str]) -> tuple[str, ...]:
    return ("-m", *rest) if "module" in given else tuple(rest)


def _read_nproc(program: str, text: str | None, notes: list[str]) -> int | str | None:
    one_a_gpu = "one rank for each GPU, and one on a node without GPUs"
    if text in (None, "gpu", "cpu"):
        return text
    if text == "auto":
        notes.append(f"{program} --nproc-per-node {text} becomes: {one_a_gpu}")
        return text
    if text == "xpu" or _is_unexpanded(text):
        why = "its variable is empty, or the shell has not expanded it"
        notes.append(f"{program} --nproc-per-node {text} is left out: {why} (default: {one_a_gpu})")
        return None
    return _read_number(program, "nproc-per-node", text, 1)


def _read_nnodes(program: str, name: str, text: str, notes: list[str]) -> tuple[int, int] | None:
    """Return the fewest and most nodes (``N`` or ``MIN:MAX``); None for one."""
    if _is_unexpanded(text):
        notes.append(f"{program} --{name} {text} is left out: --nodes or [cluster] nodes sets it")
        return None
    first, colon, second = text.partition(":")
    fewest = _read_number(program, name, first, 1) or 1
    most = (_read_number(program, name, second, 1) or 1) if colon else fewest
    if most < fewest:
        raise ConfigError(
            f"{program} --{name} {text}: the first number must not be larger than the second"
        )
    return None if most == 1 else (fewest, most)


def _read_number(program: str, name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    digits = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not (digits and least <= int(text) <= checks.MOST):
        empty = _is_unexpanded(text) or "$" in text
        raise ConfigError(
            f"{program} --{name} {text}: not a whole number from {least} to {checks.MOST}",
            hint="a variable is empty here, or the shell has not expanded it" if empty else "",
        )
    return int(text)


def _strip_variables(command: Sequence[str]) -> tuple[list[str], list[str]]:
    words, names = list(command), []
    while words:
        if match := _ASSIGNMENT.match(words[0]):
            names.append(match.group(1))
        elif words[0] not in ("env", "exec"):
            break
        elif words[1:2] and words[1].startswith("-"):
            raise ConfigError(f"{words[0]} {words[1]}: cannot be converted", hint=EXAMPLE)
        words.pop(0)
    return words, [
        f"{name}=... before the command is left out: `export {name}=...` before stager runs; your "
        f"variables reach the ranks, secrets by --pass-env {name}"
        for name in names
    ]


def _split_python_options(
    program: str, words: Sequence[str]
) -> tuple[list[str], Mapping[str, None]]:
    """Return what follows Python's own options, and those of them that a job leaves out."""
    rest = list(words)
    dropped: dict[str, None] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("--", "-m"):
        word = rest.pop(0)
        if (match := _PYTHON_OPTIONS.fullmatch(word)) is None:
            why = "only a script or a module can be run by several ranks"
            raise ConfigError(f"{program} {word}: {why}", hint=EXAMPLE)
        flags, letter, value = match.groups("")
        dropped |= dict.fromkeys(f"-{flag}" for flag in flags)
        if value:
            rest.insert(0, value)
        if letter == "m":
            rest.insert(0, "-m")
        elif letter:
            dropped[f"-{letter}"] = None
            rest = rest[1:]
    return rest, dropped


def _strip_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    program = words[0]
    rest, dropped = _split_python_options(program, words[1:])
    if rest[:1] == ["--"]:
        rest.pop(0)
    if not rest:
        raise ConfigError(f"{program}: the script is missing", hint=EXAMPLE)
    isolated = "ranks run under the environment's own Python, isolated from the node's packages"
    return rest, [f"{program} {' '.join(dropped)}: left out; {isolated}"] if dropped else []
