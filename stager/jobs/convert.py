"""A command for one machine, made into what a job needs to know to run it on several.

``python -m torch.distributed.run --nproc_per_node=8 train.py``, ``torchrun``, ``uv run``,
``accelerate launch``: each says which script runs, how many ranks a machine has, and much about
the one machine that a job decides by itself. What is left out is said, never silently lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from ..core.errors import ConfigError
from . import launcher_options
from .option_scan import Found, notes_on, scan

_PYTHON = re.compile(r"python(w|\d(\.\d+)?t?)?$")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_OLD_TORCHRUN = "torch.distributed.launch"
_MODULES = {
    "torch.distributed.run": "torchrun",
    _OLD_TORCHRUN: _OLD_TORCHRUN,
    "accelerate.commands.launch": "accelerate-launch",
}
"""Modules that are launchers, and the programs that they are."""
_OTHERS = {
    "srun": "Slurm starts the ranks; name what srun would start",
    "mpirun": "name the script alone",
    "mpiexec": "name the script alone",
    "sbatch": "stager writes the batch script itself; name what it would start",
    "deepspeed": "name the script alone; it can call deepspeed.initialize under torchrun",
    "bash": "name the script that the shell would start",
    "sh": "name the script that the shell would start",
    "conda": "name what `conda run` would start; the environment comes from the bundle",
    "poetry": "name what `poetry run` would start; the environment comes from the bundle",
    "uvx": "name the script; the environment comes from the bundle",
}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a command says about a job; None is what it does not say."""

    command: tuple[str, ...]
    """A script or ``-m MODULE``, and its arguments."""
    nproc_per_node: int | None = None
    """Ranks on each node."""
    nnodes: tuple[int, int] | None = None
    """Fewest and most nodes; None also where it says one, as a command for one machine does."""
    max_restarts: int | None = None
    """How often torchrun starts failed ranks again."""
    backend: str | None = None
    """``nccl`` or ``gloo``, where the command asks for GPUs or for CPUs."""
    notes: tuple[str, ...] = ()
    """What was left out, and why; one line each. Values of variables are not in them."""


def convert(command: Sequence[str]) -> Converted:
    """Find out what a launcher would run, and how.

    Args:
        command: the words of the command, as a shell passes them on.

    Raises:
        ConfigError: nothing to run, an option that is not known, or a launcher that cannot be
            converted; the message names it.
    """
    words, notes = _without_variables(command)
    program = PurePath(words[0]).name if words else ""
    if program == "uv":
        words, more = _without_uv(words[1:])
        notes += more
        program = PurePath(words[0]).name if words else ""
        if not words:
            raise ConfigError("uv run: there is nothing to run", hint=_hint())
    if not words:
        raise ConfigError("there is nothing to run", hint=_hint())
    if program in _OTHERS:
        raise ConfigError(f"{program} cannot be converted: {_OTHERS[program]}", hint=_hint())
    if _PYTHON.match(program):
        words, more = _without_python(words)
        notes += more
    converted = _launched(words)
    return replace(converted, notes=(*notes, *converted.notes))


def _launched(words: list[str]) -> Converted:
    """By what launcher, if any, a script (or ``-m MODULE``) is started."""
    program, arguments = PurePath(words[0]).name, words[1:]
    if program == "-m":
        if not arguments:
            raise ConfigError("-m: the name of the module is missing", hint=_hint())
        program, arguments = _MODULES.get(arguments[0], program), arguments[1:]
    if program == "accelerate":
        if arguments[:1] != ["launch"]:
            raise ConfigError("accelerate: only `accelerate launch` starts ranks", hint=_hint())
        program, arguments = "accelerate-launch", arguments[1:]
    if program in ("torchrun", _OLD_TORCHRUN):
        return _torchrun(program, arguments)
    if program == "accelerate-launch":
        return _accelerate(arguments)
    if program.startswith("-") and program != "-m":
        raise ConfigError(f"{program} is no script", hint=_hint())
    return Converted(command=tuple(words))


def _torchrun(program: str, arguments: Sequence[str]) -> Converted:
    """``torchrun``, or its older name ``torch.distributed.launch``."""
    old = program == _OLD_TORCHRUN
    table = launcher_options.LAUNCH if old else launcher_options.TORCHRUN
    found, rest = scan(program, table, arguments)
    notes = notes_on(program, table, found)
    given = {one.name: one.value for one in found}
    if old and "use-env" not in given:
        notes.append(
            f"{program} would add --local-rank=N to the script's arguments; here a rank reads its"
            " place from the variable LOCAL_RANK"
        )
    nproc, backend, more = _nproc(program, given.get("nproc-per-node"))
    nnodes, about_nodes = _nnodes(program, "nnodes", given.get("nnodes", "1"))
    return Converted(
        command=_script(program, found, rest),
        nproc_per_node=nproc,
        nnodes=nnodes,
        max_restarts=_number(program, "max-restarts", given),
        backend=backend,
        notes=(*notes, *more, *about_nodes),
    )


def _accelerate(arguments: Sequence[str]) -> Converted:
    """``accelerate launch``, which counts its processes over all machines."""
    program = "accelerate launch"
    found, rest = scan(program, launcher_options.ACCELERATE, arguments)
    notes = notes_on(program, launcher_options.ACCELERATE, found)
    given = {one.name: one.value for one in found}
    for name, variable in [
        ("mixed-precision", "ACCELERATE_MIXED_PRECISION"),
        ("dynamo-backend", "ACCELERATE_DYNAMO_BACKEND"),
    ]:
        if given.get(name, "no") != "no":
            raise ConfigError(
                f"{program} --{name} {given[name]}: it reaches the script by a variable, which a"
                " command cannot carry",
                hint=f"leave it out and set {variable}={given[name]} before stager runs: your"
                " variables reach the ranks",
            )
    cpu = "cpu" in given or "use-cpu" in given
    if cpu:
        notes.append(f"{program} --cpu: on nodes with GPUs set ACCELERATE_USE_CPU=true, too")
    nnodes, about_nodes = _nnodes(program, "num-machines", given.get("num-machines", "1"))
    total = _number(program, "num-processes", given)
    machines = nnodes[1] if nnodes else 1
    if total is not None and (total < 1 or total % machines):
        raise ConfigError(
            f"{program} --num-processes {total}: not a multiple of --num-machines {machines}",
            hint="accelerate counts the processes of all machines together",
        )
    return Converted(
        command=_script(program, found, rest),
        nproc_per_node=total // machines if total is not None else None,
        nnodes=nnodes,
        max_restarts=_number(program, "max-restarts", given),
        backend="gloo" if cpu else "nccl" if "multi-gpu" in given else None,
        notes=(*notes, *about_nodes),
    )


def _script(program: str, found: Sequence[Found], rest: Sequence[str]) -> tuple[str, ...]:
    """What the launcher launches."""
    if not rest:
        raise ConfigError(f"{program}: the script is missing", hint=_hint())
    module = any(one.name == "module" for one in found)
    return ("-m", *rest) if module else tuple(rest)


def _nproc(program: str, text: str | None) -> tuple[int | None, str | None, list[str]]:
    """Ranks a node, the backend that this asks for, and notes."""
    one_a_gpu = "one rank a GPU, and one on a node without"
    if text is None:
        return None, None, []
    if text in ("auto", "gpu"):
        notes = [f"{program} --nproc-per-node {text} becomes: {one_a_gpu}"]
        return None, "nccl" if text == "gpu" else None, notes if text == "auto" else []
    if text in ("cpu", "xpu"):
        why = f"{program} --nproc-per-node {text} is left out; say how many with --nproc-per-node N"
        return None, "gloo" if text == "cpu" else None, [f"{why} (default: {one_a_gpu})"]
    if _variable(text):
        why = f"{program} --nproc-per-node {text} is left out: no shell has filled it in"
        return None, None, [f"{why} (default: {one_a_gpu})"]
    return _positive(program, "nproc-per-node", text), None, []


def _nnodes(program: str, name: str, text: str) -> tuple[tuple[int, int] | None, list[str]]:
    """Fewest and most nodes, ``N`` or ``MIN:MAX``, and notes; one node is no wish."""
    if _variable(text):
        return None, [f"{program} --{name} {text} is left out: --nodes or [cluster] nodes says it"]
    first, colon, second = text.partition(":")
    fewest = _positive(program, name, first)
    most = _positive(program, name, second) if colon else fewest
    if most < fewest:
        raise ConfigError(f"{program} --{name} {text}: the first number is the smaller one")
    return (None if most == 1 else (fewest, most)), []


def _number(program: str, name: str, given: dict[str, str]) -> int | None:
    """A whole number from 0 on; None where it is not given."""
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{program} --{name} {text}: not a whole number")
    return int(text)


def _positive(program: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigError(f"{program} --{name} {text}: not a number from 1 on")
    return int(text)


def _variable(text: str) -> bool:
    """Whether a shell within a job was to fill it in: ``$SLURM_NNODES``, or nothing at all."""
    return not text or text.startswith("$")


def _without_variables(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command without ``VAR=value`` before it; notes tell names only, values may be secret."""
    words, names = list(command), []
    if words[:1] == ["env"]:
        words.pop(0)
        if words[:1] and words[0].startswith("-"):
            raise ConfigError(f"env {words[0]}: cannot be carried over", hint=_hint())
    while words and (match := _ASSIGNMENT.match(words[0])):
        names.append(match.group(1))
        words.pop(0)
    return words, [
        f"{name}=... before the command is left out: set it before stager runs, as in"
        f" `export {name}=...`; your variables reach the ranks, secrets by --pass-env {name}"
        for name in names
    ]


def _without_uv(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What ``uv run`` runs: a script, a module, or a program."""
    before, rest = scan("uv", launcher_options.UV_RUN, arguments)
    if rest[:1] != ["run"]:
        raise ConfigError("uv: only `uv run` starts a program", hint=_hint())
    found, words = scan("uv run", launcher_options.UV_RUN, rest[1:])
    notes = notes_on("uv run", launcher_options.UV_RUN, [*before, *found])
    if words and any(one.name == "module" for one in found):
        words = ["-m", *words]
    return words, notes


def _without_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What ``python ...`` runs: ``-m MODULE`` or a script, with their arguments."""
    program, rest = words[0], list(words[1:])
    dropped: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        for at, letter in enumerate(word[1:], start=1):
            tail = word[at + 1 :]
            if letter == "m":
                return ["-m", *([tail] if tail else []), *rest], _python_notes(program, dropped)
            if letter in launcher_options.PYTHON_VALUES:
                dropped.append(f"-{letter}")
                if not tail:
                    rest = rest[1:]
                break
            if letter not in launcher_options.PYTHON_FLAGS:
                raise ConfigError(
                    f"{program} {word}: only a script or a module can be run by several ranks",
                    hint=_hint(),
                )
            dropped.append(f"-{letter}")
    if rest[:1] == ["--"]:
        rest.pop(0)
    if not rest:
        raise ConfigError(f"{program}: the script is missing", hint=_hint())
    return rest, _python_notes(program, dropped)


def _python_notes(program: str, dropped: Sequence[str]) -> list[str]:
    if not dropped:
        return []
    return [
        f"{program} {' '.join(dict.fromkeys(dropped))}: left out; ranks run under the environment's"
        " own Python, isolated from the node's packages"
    ]


def _hint() -> str:
    return "name a script or a module: stager run -- train.py --epochs 3, or -- -m package.train"
