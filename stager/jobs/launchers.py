"""The launchers of Python programs: their options as they read them, and what becomes of them.

torchrun: ``torch/distributed/run.py`` of torch 2.13; accelerate: ``commands/launch.py`` of 1.15;
uv: ``uv run --help`` of 0.13. Options of accelerate that configure the training itself (DeepSpeed,
FSDP, Megatron-LM, dynamo, FP8...) are left unknown: they must not be dropped silently.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a launcher, and its meaning for a job."""

    takes: Callable[[str], object] | None = None
    """The type of its value, as argparse has it; None for an option without a value."""
    dropped: str = ""
    """The reason why it is left out of the job; empty where it is used."""
    refused: str = ""
    """The reason why the whole command cannot be converted; empty where it can."""
    short: str = ""
    """Its one-letter form, without the dash."""


def read_options(
    program: str, table: Mapping[str, Option], words: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Split a launcher's arguments into its options and what it launches, as argparse does.

    Returns:
        The values of the options by name, in the order of the command, empty for those that take
        none; and the rest, with the script or module first.

    Raises:
        ConfigError: an option that is not in the table or is refused, a value that is missing or
            that the launcher would refuse, or nothing to launch.
    """
    parser = _Parser(
        prog=program,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        allow_abbrev=False,
    )
    for name, option in table.items():
        names = _spellings(name, option, () if program == ACCELERATE_LAUNCH else table)
        if option.takes is None:
            parser.add_argument(*names, dest=name, action="store_const", const="")
        else:
            parser.add_argument(*names, dest=name, type=_judge(option.takes))
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    try:
        found, unknown = parser.parse_known_args(list(words))
    except argparse.ArgumentError as exc:
        name = (exc.argument_name or "").partition("/")[0]
        raise _explain(f"{program} {name}", table.get(name[2:], Option()), exc.message) from None
    for word in unknown[:1]:
        shown = word.partition("=")[0]
        raise ConfigError(
            f"{program} {shown}: not an option that can be carried over",
            hint=_advise(program, shown, table),
        )
    given = vars(found)
    rest = [given.pop("script"), *given.pop("rest")]
    for name in given:
        if table[name].refused:
            raise ConfigError(f"{program} --{name}: {table[name].refused}")
    return given, rest


def notes_on(program: str, table: Mapping[str, Option], given: Mapping[str, str]) -> list[str]:
    """Return a line for each option that was left out."""
    dropped = ((name, table[name].dropped) for name in given)
    return [f"{program} --{name} is left out: {why}" for name, why in dropped if why]


def is_unexpanded(text: str) -> bool:
    """Return whether a shell within a job was to fill it in: ``$SLURM_NNODES``, or nothing."""
    return not text or text.startswith("$")


def _advise(program: str, shown: str, table: Collection[str]) -> str:
    near = difflib.get_close_matches(shown[2:].replace("_", "-"), table, n=1, cutoff=_NEAR)
    if near:
        return f"did you mean --{near[0]}?"
    if program == ACCELERATE_LAUNCH:
        return (
            "accelerate passes the options of a training to the script in variables, as --use_fsdp "
            "in ACCELERATE_USE_FSDP=true: leave it out, and set its variable before stager runs"
        )
    return "leave it out, or name only the script: stager run -- train.py ..."


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        if "are required" in message:
            message = "the script is missing"
        raise ConfigError(f"{self.prog}: {message}", hint=EXAMPLE)


def _spellings(name: str, option: Option, names: Collection[str]) -> list[str]:
    """Return all that stands for an option: among these names, also what only it begins with.

    argparse would find out itself, but also for the script's arguments, and refuse those that fit
    two options (https://github.com/python/cpython/issues/58573).
    """
    ends = [name[:size] for size in range(len(name), 0, -1)] if names else [name]
    own = [end for end in ends if end == name or sum(one.startswith(end) for one in names) == 1]
    both = dict.fromkeys(f"--{text}" for end in own for text in (end, end.replace("-", "_")))
    return [*both, *([f"-{option.short}"] if option.short else [])]


def _judge(kind: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if is_unexpanded(text):
            return text
        if text.endswith(".py"):  # the next word, where a variable before it is empty
            raise argparse.ArgumentTypeError(f"{text} is not a value, it looks like the script")
        try:
            kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a value that it takes") from None
        return text

    return check


def _explain(shown: str, option: Option, message: str) -> ConfigError:
    if message.startswith("ignored explicit argument"):
        return ConfigError(f"{shown}: this option takes no value")
    if message.startswith("expected"):
        message = "its value is missing"
    out = "leave the option out" + (f": {option.dropped}" if option.dropped else "")
    return ConfigError(
        f"{shown}: {message}",
        hint=f"a variable is probably empty here: after `{shown.rpartition(' ')[2]} $VARIABLE` "
        f"the next word then takes its place; {out}",
    )


def _matching(pattern: str) -> Callable[[str], object]:
    def check(text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError

    return check


ACCELERATE_LAUNCH = "accelerate launch"
EXAMPLE = "name a script or a module: stager run -- train.py --epochs 3, or -- -m package.train"

_NEAR = 0.8
"""How alike an option and a known one must be; ``--use_fsdp`` is not ``--use_cpu``."""

_RENDEZVOUS = "the job's own nodes, port and id are used"
_LOGS = "every rank has a log of its own in the log directory"
_NO_PYTHON = "ranks are Python programs, started by the environment's own interpreter"
_SET_BY_STAGER = "stager sets it itself where it starts torchrun on each node"
_BIND = "bind through Slurm, with [cluster] salloc-args"
_STREAMS = _matching(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
"""The streams of ``--tee`` and ``--redirects``, see ``Std.from_str`` of torch."""


def _values(names: str, why: str, kind: Callable[[str], object] = str) -> dict[str, Option]:
    return {name: Option(takes=kind, dropped=why) for name in names.split()}


def _flags(names: str, why: str) -> dict[str, Option]:
    return {name: Option(dropped=why) for name in names.split()}


TORCHRUN: dict[str, Option] = {
    "nnodes": Option(takes=str),
    "nproc-per-node": Option(takes=str),
    "max-restarts": Option(takes=str),
    "module": Option(short="m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_flags("standalone", "stager sets where the ranks meet"),
    **_values("rdzv-backend rdzv-endpoint rdzv-id rdzv-conf master-addr local-addr", _RENDEZVOUS),
    **_values("node-rank master-port", _RENDEZVOUS, int),
    **_values("log-dir logs-specs duplicate-stdout-filters duplicate-stderr-filters", _LOGS),
    **_values("local-ranks-filter", _LOGS, _matching(r" *\d+ *(, *\d+ *)*")),
    "redirects": Option(takes=_STREAMS, dropped=_LOGS, short="r"),
    "tee": Option(takes=_STREAMS, dropped=_LOGS, short="t"),
    **_flags("run-path", "the wrapper runs the script in its own interpreter anyway"),
    **_values("event-log-handler role signals-to-handle", _SET_BY_STAGER),
    **_values("monitor-interval", _SET_BY_STAGER, float),
    **_values("shutdown-timeout", _SET_BY_STAGER, int),
    **_values("start-method", _SET_BY_STAGER, _matching("spawn|fork|forkserver")),
    **_values("numa-binding", _BIND, _matching("node|socket|exclusive|core-complex")),
    **_flags("virtual-local-rank", "each rank finds its GPU by LOCAL_RANK"),
}

LAUNCH: dict[str, Option] = {**TORCHRUN, "use-env": Option()}
"""Of ``torch.distributed.launch``, the older name."""

ACCELERATE: dict[str, Option] = {
    "num-processes": Option(takes=str),
    "num-machines": Option(takes=str),
    "max-restarts": Option(takes=str),
    "mixed-precision": Option(takes=_matching("no|fp16|bf16|fp8")),
    "dynamo-backend": Option(takes=str),
    "multi-gpu": Option(),
    "cpu": Option(),
    "use-cpu": Option(),
    "module": Option(short="m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_values("main-process-ip rdzv-backend rdzv-conf", _RENDEZVOUS),
    **_values("machine-rank main-process-port", _RENDEZVOUS, int),
    **_flags("same-network", _RENDEZVOUS),
    **_values("log-dir", _LOGS),
    "tee": Option(takes=str, dropped=_LOGS, short="t"),
    **_values("role", _SET_BY_STAGER),
    **_values("monitor-interval", _SET_BY_STAGER, float),
    **_values("gpu-ids", "Slurm decides which GPUs a job gets"),
    **_values("num-cpu-threads-per-process", "set it with [launch] omp-num-threads", int),
    **_flags("enable-cpu-affinity", _BIND),
    "quiet": Option(dropped="stager run -q is quiet", short="q"),
    **_flags("debug", "set ACCELERATE_DEBUG_MODE=true before stager runs"),
    "config-file": Option(
        takes=str, refused="its settings cannot be carried over; give them as options"
    ),
}

_BUNDLE = "the environment comes from the bundle"

UV_RUN: dict[str, Option] = {
    "module": Option(short="m"),
    "script": Option(short="s"),
    "gui-script": Option(),
    "with": Option(
        takes=str, dropped="name the package in [environment] requirements and build", short="w"
    ),
    "python": Option(takes=str, dropped=_BUNDLE + "; see [environment] python", short="p"),
    **_values("extra no-extra group no-group only-group env-file with-editable", _BUNDLE),
    **_values("with-requirements package python-platform index default-index", _BUNDLE),
    "index-url": Option(takes=str, dropped=_BUNDLE, short="i"),
    "find-links": Option(takes=str, dropped=_BUNDLE, short="f"),
    "upgrade-package": Option(takes=str, dropped=_BUNDLE, short="P"),
    "config-setting": Option(takes=str, dropped=_BUNDLE, short="C"),
    **_values("extra-index-url index-strategy keyring-provider upgrade-group resolution", _BUNDLE),
    **_values("prerelease prerelease-package fork-strategy exclude-newer", _BUNDLE),
    **_values("exclude-newer-package no-sources-package reinstall-package link-mode", _BUNDLE),
    **_values("config-settings-package no-build-isolation-package no-build-package", _BUNDLE),
    **_values("no-binary-package no-editable-package cache-dir refresh-package color", _BUNDLE),
    **_values("allow-insecure-host project config-file", _BUNDLE),
    "directory": Option(
        takes=str, refused="ranks run where stager is called from; change to that directory first"
    ),
    **_flags("all-extras no-dev dev only-dev no-default-groups all-groups no-editable", _BUNDLE),
    **_flags("exact no-env-file isolated active no-sync locked frozen all-packages", _BUNDLE),
    **_flags("no-project no-index no-sources reinstall compile-bytecode refresh", _BUNDLE),
    **_flags("no-build-isolation no-build no-binary require-build-hashes", _BUNDLE),
    **_flags("no-require-build-hashes managed-python no-managed-python offline", _BUNDLE),
    **_flags("no-python-downloads system-certs native-tls no-progress no-config", _BUNDLE),
    "upgrade": Option(dropped=_BUNDLE, short="U"),
    "no-cache": Option(dropped=_BUNDLE, short="n"),
    "quiet": Option(dropped=_BUNDLE, short="q"),
    "verbose": Option(dropped=_BUNDLE, short="v"),
}

PYTHON_FLAGS = "bBdEiIOPqRsSuvx"
"""One-letter options of Python without a value; ranks are isolated and unbuffered in any case."""
PYTHON_VALUES = "WX"
"""Those with one."""

_SCRIPT_ALONE = "name the script or module alone"
_RANKS = f"{_SCRIPT_ALONE}; --nodes and --nproc-per-node say how many ranks stager starts"
_IN_ENVIRONMENT = "name what it would start; the environment comes from the bundle"
_IN_CONTAINER = f"{_SCRIPT_ALONE}; --container-image IMAGE starts the ranks in an image"
_AROUND_STAGER = f"{_SCRIPT_ALONE}; start stager itself by it, or submit the job with --batch"
_AROUND_PYTHON = f"{_SCRIPT_ALONE}; the environment's own Python starts each rank"
_SHELL = "name the script that the shell would start"

_REFUSED: dict[str, str] = {
    "srun": f"{_RANKS}, --launcher srun that srun starts each of them",
    "mpirun mpiexec orterun prun prterun jsrun lrun aprun ibrun flux": _RANKS,
    "horovodrun colossalai torchx composer fabric lightning ray pdsh clush ezpz-launch": _RANKS,
    "sbatch salloc qsub bsub oarsub": "name what it would start; --batch submits a batch job",
    "deepspeed": f"{_RANKS}; the script can call deepspeed.initialize under torchrun",
    "litgpt llamafactory-cli axolotl tune xtuner swift": (
        "name a script, or the module behind the program (-m litgpt)"
    ),
    "conda mamba micromamba pixi poetry pdm hatch pipenv rye uvx": _IN_ENVIRONMENT,
    "apptainer singularity docker podman enroot shifter sarus ch-run": _IN_CONTAINER,
    "numactl taskset hwloc-bind likwid-pin": f"{_SCRIPT_ALONE}; {_BIND}",
    "nohup setsid screen tmux nice ionice": _AROUND_STAGER,
    "timeout": f"{_SCRIPT_ALONE}; --time limits a job",
    "time stdbuf unbuffer strace gdb xvfb-run sudo xargs parallel": _AROUND_PYTHON,
    "nsys ncu rocprof py-spy scalene memray coverage ipython pytest": _AROUND_PYTHON,
    "bash sh zsh dash ksh csh tcsh fish exec eval source . cd export ssh": _SHELL,
    "torchrun accelerate accelerate-launch uv env": "a launcher cannot start another one",
}
_PROGRAMS = {name: why for names, why in _REFUSED.items() for name in names.split()}
_MODULES = {
    **dict.fromkeys(("ezpz.launch", "ezpz.cli.launch", "composer.cli.launcher"), _RANKS),
    **dict.fromkeys(("deepspeed.launcher.runner", "deepspeed.launcher.launch"), _RANKS),
    **dict.fromkeys(("horovod.runner.launch", "torch.distributed.launcher"), _RANKS),
    **dict.fromkeys(("mpi4py", "mpi4py.run", "debugpy", "pdb", "cProfile"), _AROUND_PYTHON),
}
_PYTHON = re.compile(r"(python|pypy)(w|\d(\.\d+)?t?)?")


def is_python(program: str) -> bool:
    """Return whether this is the name of an interpreter."""
    return _PYTHON.fullmatch(program) is not None


def refuse_program(command: Sequence[str]) -> None:
    """Refuse a program that is known, and is no Python script or module.

    Raises:
        ConfigError: it is one; the hint says what does its job here.
    """
    module = command[1:2] if command[0] == "-m" else []
    name = module[0] if module else command[0].rpartition("/")[2]
    why = (_MODULES if module else _PROGRAMS).get(name)
    if is_python(name):
        why = "leave it out: the environment's own Python starts the ranks"
    if why is not None:
        shown = f"-m {name}" if module else name
        raise ConfigError(f"{shown} cannot be converted: {why}", hint=EXAMPLE)
