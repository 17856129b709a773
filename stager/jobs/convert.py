"""Conversion of a command for one machine into the settings of a job on several.

``python -m torch.distributed.run --nproc_per_node=8 train.py``, ``torchrun``, ``uv run``,
``accelerate launch``: each names the script, the ranks of a machine, and much about that machine
which a job decides by itself. A note names each option that is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from bundle.protocol.enumerations import Backend

from ..config import checks
from ..core.errors import ConfigError
from . import launchers
from .launchers import EXAMPLE, is_unexpanded, notes_on, read_options

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_OLD_TORCHRUN = "torch.distributed.launch"
_ACCELERATE = launchers.ACCELERATE_LAUNCH
_MOST_DIGITS = len(str(checks.MOST))
_ACCELERATE_VARIABLES = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    _OLD_TORCHRUN: _OLD_TORCHRUN,
    "accelerate.commands.launch": "accelerate-launch",
}
"""Modules that are launchers, each with its program."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The settings of a job that a command gives; None for those it leaves open."""

    command: tuple[str, ...]
    """A script or ``-m MODULE``, and its arguments."""
    nproc_per_node: int | str | None = None
    """Ranks on each node: a number, ``auto``, ``gpu`` or ``cpu``."""
    nnodes: tuple[int, int] | None = None
    """Fewest and most nodes; None for one node too, as every command for one machine has that."""
    max_restarts: int | None = None
    """The number of times that torchrun starts failed ranks again."""
    backend: Backend | None = None
    """``nccl`` or ``gloo``, where the command asks for GPUs or for CPUs."""
    notes: tuple[str, ...] = ()
    """A line for each option that was left out, with the reason; without values of variables."""


def convert(command: Sequence[str]) -> Converted:
    """Return what a launcher would run, and how.

    Raises:
        ConfigError: nothing to run, an option that is not known, or a launcher that cannot be
            converted; the message names it.
    """
    if any(word.endswith("\r") for word in command):
        raise ConfigError(
            "the command ends in a carriage return: its file has the line ends of Windows",
            hint="remove them: sed -i 's/\\r$//' FILE",
        )
    words, notes = _without_variables(command)
    if words and PurePath(words[0]).name == "uv":
        words, more = _without_uv(words[1:])
        notes += more
    if words and launchers.is_python(PurePath(words[0]).name):
        words, more = _without_python(words)
        notes += more
    if not words:
        raise ConfigError("there is nothing to run", hint=EXAMPLE)
    converted = _launched(words)
    launchers.refuse_program(converted.command)
    return replace(converted, notes=(*notes, *converted.notes))


def _launched(words: list[str]) -> Converted:
    program, arguments = PurePath(words[0]).name, words[1:]
    if words[0] == "-m":
        if not arguments:
            raise ConfigError("-m: the name of the module is missing", hint=EXAMPLE)
        program, arguments = _MODULES.get(arguments[0], program), arguments[1:]
    if program == "accelerate":
        if arguments[:1] != ["launch"]:
            raise ConfigError("accelerate: only `accelerate launch` starts ranks", hint=EXAMPLE)
        program, arguments = "accelerate-launch", arguments[1:]
    if program in ("torchrun", _OLD_TORCHRUN):
        return _torchrun(program, arguments)
    if program == "accelerate-launch":
        return _accelerate(arguments)
    if words[0].startswith("-") and words[0] != "-m":
        raise ConfigError(
            f"{words[0]} is not a script; what follows the two dashes replaces project.command",
            hint=EXAMPLE,
        )
    return Converted(command=tuple(words))


def _torchrun(program: str, arguments: Sequence[str]) -> Converted:
    """Convert ``torchrun``, or its older name ``torch.distributed.launch``."""
    old = program == _OLD_TORCHRUN
    table = launchers.LAUNCH if old else launchers.TORCHRUN
    given, rest = read_options(program, table, arguments)
    notes = notes_on(program, table, given)
    if old and "use-env" not in given:
        notes.append(
            f"{program} would add --local-rank=N to the script's arguments; here a rank reads "
            "its local rank from the variable LOCAL_RANK"
        )
    nproc, more = _nproc(program, given.get("nproc-per-node"))
    nnodes, about_nodes = _nnodes(program, "nnodes", given.get("nnodes", "1"))
    return Converted(
        command=_script(given, rest),
        nproc_per_node=nproc,
        nnodes=nnodes,
        max_restarts=_number(program, "max-restarts", given),
        notes=(*notes, *more, *about_nodes),
    )


def _accelerate(arguments: Sequence[str]) -> Converted:
    """Convert ``accelerate launch``, which counts its processes over all machines."""
    program = _ACCELERATE
    given, rest = read_options(program, launchers.ACCELERATE, arguments)
    notes = notes_on(program, launchers.ACCELERATE, given)
    _refuse_accelerate_variables(given)
    backend = Backend.NCCL if "multi-gpu" in given else None
    if "cpu" in given or "use-cpu" in given:
        backend = Backend.GLOO
        notes.append(f"{program} --cpu: on nodes with GPUs set ACCELERATE_USE_CPU=true, too")
    nnodes, about_nodes = _nnodes(program, "num-machines", given.get("num-machines", "1"))
    return Converted(
        command=_script(given, rest),
        nproc_per_node=_processes_per_machine(given, nnodes[1] if nnodes else 1),
        nnodes=nnodes,
        max_restarts=_number(program, "max-restarts", given),
        backend=backend,
        notes=(*notes, *about_nodes),
    )


def _refuse_accelerate_variables(given: Mapping[str, str]) -> None:
    for name, variable in _ACCELERATE_VARIABLES.items():
        value = given.get(name, "no")
        if value != "no":
            raise ConfigError(
                f"{_ACCELERATE} --{name} {value}: it reaches the script as an environment "
                "variable, which cannot be part of a command",
                hint=f"leave it out and set {variable}={value} before stager runs: your"
                " variables reach the ranks",
            )


def _processes_per_machine(given: Mapping[str, str], machines: int) -> int | None:
    total = _number(_ACCELERATE, "num-processes", given)
    if total is None:
        return None
    if total < 1 or total % machines:
        raise ConfigError(
            f"{_ACCELERATE} --num-processes {total}: not a multiple of --num-machines {machines}",
            hint="accelerate counts the processes of all machines together",
        )
    return total // machines


def _script(given: Mapping[str, str], rest: Sequence[str]) -> tuple[str, ...]:
    return ("-m", *rest) if "module" in given else tuple(rest)


def _nproc(program: str, text: str | None) -> tuple[int | str | None, list[str]]:
    """Return the ranks of a node (a number or one of torchrun's words), and notes."""
    one_a_gpu = "one rank for each GPU, and one on a node without GPUs"
    if text is None or text in ("gpu", "cpu"):
        return text, []
    if text == "auto":
        return text, [f"{program} --nproc-per-node {text} becomes: {one_a_gpu}"]
    if text == "xpu" or is_unexpanded(text):
        why = "the shell has not expanded it" if text else "its variable is empty"
        why = "say how many" if text == "xpu" else why
        why = f"{program} --nproc-per-node {text} is left out: {why}"
        return None, [f"{why} (default: {one_a_gpu})"]
    return _positive(program, "nproc-per-node", text), []


def _nnodes(program: str, name: str, text: str) -> tuple[tuple[int, int] | None, list[str]]:
    """Return the fewest and most nodes (``N`` or ``MIN:MAX``; None for one), and notes."""
    if is_unexpanded(text):
        return None, [f"{program} --{name} {text} is left out: --nodes or [cluster] nodes sets it"]
    first, colon, second = text.partition(":")
    fewest = _positive(program, name, first)
    most = _positive(program, name, second) if colon else fewest
    if most < fewest:
        raise ConfigError(
            f"{program} --{name} {text}: the first number must not be larger than the second"
        )
    return (None if most == 1 else (fewest, most)), []


def _number(program: str, name: str, given: Mapping[str, str]) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    return _whole(program, name, text, 0)


def _positive(program: str, name: str, text: str) -> int:
    return _whole(program, name, text, 1)


def _whole(program: str, name: str, text: str, least: int) -> int:
    """Read a number, within the range that the settings allow."""
    digits = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not (digits and least <= int(text) <= checks.MOST):
        empty = is_unexpanded(text) or "$" in text
        raise ConfigError(
            f"{program} --{name} {text}: not a whole number from {least} to {checks.MOST}",
            hint="a variable is empty here, or the shell has not expanded it" if empty else "",
        )
    return int(text)


def _without_variables(command: Sequence[str]) -> tuple[list[str], list[str]]:
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
        f"{name}=... before the command is left out: set it before stager runs, as in"
        f" `export {name}=...`; your variables reach the ranks, secrets by --pass-env {name}"
        for name in names
    ]


def _without_uv(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    before, rest = read_options("uv", launchers.UV_RUN, arguments)
    if rest[0] != "run":
        raise ConfigError("uv: only `uv run` starts a program", hint=EXAMPLE)
    given, words = read_options("uv run", launchers.UV_RUN, rest[1:])
    notes = notes_on("uv run", launchers.UV_RUN, {**before, **given})
    return list(_script(given, words)), notes


def _without_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    program, rest = words[0], list(words[1:])
    dropped: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        flags, last, tail = _python_options(program, word)
        dropped += flags
        if last == "m":
            module = [tail] if tail else []
            return ["-m", *module, *rest], _python_notes(program, dropped)
        if last and not tail:  # its value is the next word
            rest = rest[1:]
    if rest[:1] == ["--"]:
        rest.pop(0)
    if not rest:
        raise ConfigError(f"{program}: the script is missing", hint=EXAMPLE)
    return rest, _python_notes(program, dropped)


def _python_options(program: str, word: str) -> tuple[list[str], str, str]:
    """Split Python's one-letter options: flags to drop, a letter with a value, that value."""
    flags: list[str] = []
    for at, letter in enumerate(word[1:], start=1):
        if letter == "m":
            return flags, letter, word[at + 1 :]
        flags.append(f"-{letter}")
        if letter in launchers.PYTHON_VALUES:
            return flags, letter, word[at + 1 :]
        if letter not in launchers.PYTHON_FLAGS:
            raise ConfigError(
                f"{program} {word}: only a script or a module can be run by several ranks",
                hint=EXAMPLE,
            )
    return flags, "", ""


def _python_notes(program: str, dropped: Sequence[str]) -> list[str]:
    if not dropped:
        return []
    return [
        f"{program} {' '.join(dict.fromkeys(dropped))}: left out; ranks run under the environment's"
        " own Python, isolated from the node's packages"
    ]
