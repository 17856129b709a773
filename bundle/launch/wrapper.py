"""Runs the user's script or module in one rank, and leaves a record when it fails.

Written verbatim as ``run_wrapper.py`` for each job and started for each rank with the
environment's own interpreter, so it stands alone: standard library only, Python 3.9 or newer.

    run_wrapper.py SCRIPT ARGS...
    run_wrapper.py -m MODULE ARGS...

Variables, each of which may be absent: ``STAGER_ENV`` (its packages come first on ``sys.path``),
``STAGER_PROJECT``, ``STAGER_TRAINER`` (last on ``sys.path``), ``STAGER_JOB_DIR``, ``STAGER_NODE``,
``RANK``, ``LOCAL_RANK``, ``STAGER_OUTPUT`` (the folder of the local ranks' pipes) with
``STAGER_OUTPUT_NONCE``, and ``STAGER_WATCH`` (``1``: the agent may ask where the rank is).

The exit status is the program's; 2 when there is no such script or module. With any but 0,
``$STAGER_JOB_DIR/failures/<RANK>.json`` holds

    {"v": 1, "node": "n1", "rank": 3, "local_rank": 1, "pid": 4242, "exit_code": 1,
     "exception": "ValueError", "message": "...", "lines": ["Traceback ...", ...],
     "time": 1700000000.0, "variables": [...], "step": {"step": 17}, "seeds": {"torch": "42"}}

where ``lines`` are the last of the traceback with the last frame of the user's own code. The record
of a program that ended itself because of an exception, as Hydra does, is about that exception.
"""

import _thread
import contextlib
import faulthandler
import functools
import importlib.util
import io
import itertools
import json
import linecache
import os
import re
import runpy
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Callable, Optional

FAILED, USAGE, INTERRUPTED = 1, 2, 130
RECORDED_LINES, RECORDED_CHARACTERS = 40, 2000
_FRAME = re.compile(r'^\s+File "([^"]*)')
_NOT_OWN = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python3|(?:^|/)run_wrapper\.py$")
_ONLY_EXITS = ("Exit", "Abort")  # the exceptions with which click and typer programs end themselves

Program = tuple[str, str]  # ``("script", its absolute path)`` or ``("module", its name)``


def main(argv: list[str]) -> int:
    """Run the program that ``argv`` (without this file's own name) asks for; return its status."""
    kind, args = ("module", argv[1:]) if argv[:1] == ["-m"] else ("script", argv)
    if not args:
        _complain("usage: run_wrapper.py [-m MODULE | SCRIPT] ARGS...")
        return USAGE
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which the launcher ignores
        signal.signal(number, signal.SIG_DFL)
    take_own_pipe()
    forget_record()
    answer_questions()
    send_event("started")
    if os.environ.get("STAGER_JOB_DIR"):
        sys.meta_path.insert(0, _GroupsFinder())
    write_whole_lines()
    name = args[0]
    if kind == "script":
        name, why = _find_script(name)
        if not name:
            return _refuse(FileNotFoundError(f"no script {args[0]}: there is {why}"))
    program = (kind, name)
    arrange_path(program)
    activate_patches()
    sys.argv = [name, *args[1:]]
    rank_pid, status = os.getpid(), 0
    try:
        if kind == "module":
            keep_main(runpy.run_module(name, run_name="__main__", alter_sys=True))
        else:
            keep_main(runpy.run_path(name, run_name="__main__"))
    except BaseException as error:  # every way to end: the record and the status depend on it
        status = _handle_error(error, program, is_rank=os.getpid() == rank_pid)
    if os.getpid() == rank_pid:
        end_watch(status)
    return status


def _find_script(name: str) -> tuple[str, str]:
    """Return a script's absolute path, empty if there is none, and the words for that case."""
    # An absolute name joined to a root is that name itself: both places are then one.
    paths = list(dict.fromkeys(Path(root or "", name).absolute() for root in (_find_project(), "")))
    found = next((str(path) for path in paths if path.exists()), "")
    staged, here = paths[0], paths[-1]
    why = f"neither {staged} (the staged project) nor {here} (the working directory); check "
    why += "the name, and that the project does not exclude it"
    return found, why if staged != here else f"no {here}"


def arrange_path(program: Program) -> None:
    """Put the program's directory, the project and the packages at the head of ``sys.path``.

    The packages' entry keeps its spelling: a module must not be imported twice under two names.
    """
    own = os.path.realpath(Path(__file__).parent)
    if sys.path and os.path.realpath(sys.path[0]) == own:
        del sys.path[0]
    env = os.environ.get("STAGER_ENV")
    packages = os.path.realpath(Path(env, "pkgs") if env else sysconfig.get_path("purelib"))
    if Path(packages).is_dir() and packages not in map(os.path.realpath, sys.path):
        site.addsitedir(packages)  # not a plain entry: its .pth files count, too
    head = [entry for entry in sys.path if os.path.realpath(entry) == packages]
    own_code = [_find_own_folder(program), _find_project(), find_src_folder(_find_project())]
    kept: dict[str, str] = {}
    for entry in filter(None, [*own_code, *head, *sys.path, os.environ.get("STAGER_TRAINER")]):
        kept.setdefault(os.path.realpath(entry), entry)
    sys.path[:] = kept.values()


def _find_own_folder(program: Program) -> str:
    """Return what Python itself would put first on ``sys.path``; for a module, the project."""
    kind, name = program
    if kind == "module":
        return _find_project() or str(Path.cwd())
    return name if Path(name).is_dir() else str(Path(name).parent)


def _find_project() -> Optional[str]:
    project = os.environ.get("STAGER_PROJECT")
    return project if project and Path(project).is_dir() else None


def find_src_folder(project: Optional[str]) -> Optional[str]:
    """Return the directory of a project's packages in a src layout; None for another layout."""
    sources = Path(project or "", "src")
    is_layout = sources.is_dir() and not (sources / "__init__.py").exists()
    return str(sources) if project and is_layout else None


def take_own_pipe() -> None:
    """Send what this rank and its children write into its own pipe, whose first line names it."""
    folder = os.environ.get("STAGER_OUTPUT")
    nonce = os.environ.pop("STAGER_OUTPUT_NONCE", "")  # the program must not name a rank
    if not folder:
        return
    try:
        pipe = os.open(Path(folder, str(_read_number("LOCAL_RANK"))), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads it: what is inherited is as good
        return
    os.set_blocking(pipe, True)
    os.write(pipe, f"\x1erank {_read_number('RANK')} {nonce}\n".encode())
    for stream in (1, 2):
        os.dup2(pipe, stream)
    os.close(pipe)


def write_whole_lines() -> None:
    """Write each line at its end and at once; unbuffered, ``print("a", "b")`` is four pieces."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def activate_patches() -> None:
    """Activate the environment's compatibility patches here and in every child process."""
    os.environ.setdefault("STAGER_PATCHES", "1")
    try:
        patches = importlib.import_module("_stager_patches")
    except ModuleNotFoundError:
        return  # an environment that was made without them
    patches.activate()


def keep_main(program_globals: dict[str, Any]) -> None:
    """Keep the program's ``__main__``, which ``runpy`` replaces: threads and pools may need it."""
    module = types.ModuleType("__main__")
    vars(module).update(program_globals)
    sys.modules["__main__"] = module


def _handle_error(error: BaseException, program: Program, *, is_rank: bool) -> int:
    """Record and show the error; return the exit status. A forked child leaves no record."""
    frames = _program_frames(error.__traceback__)
    if frames is None and isinstance(error, ImportError):
        name = f"-m {program[1]}" if program[0] == "module" else program[1]
        return _refuse(type(error)(f"cannot run {name}: {error} (looked first in {sys.path[0]})"))
    if frames and frames.tb_frame.f_globals.get("__name__") == "__main__":
        keep_main(frames.tb_frame.f_globals)
    status = exit_status(error)
    error = error.with_traceback(frames)
    if status and is_rank:
        write_record(error, status)
    if not isinstance(error, SystemExit):
        _show(error)
    elif not isinstance(error.code, (int, type(None))):
        _complain(str(error.code))
    return status


def _find_caught(error: BaseException) -> Optional[Exception]:
    """Return the exception because of which a program has ended itself with a status, if any."""
    if not isinstance(error, SystemExit) or isinstance(error.code, str):
        return None
    last: BaseException = error
    while True:
        caught = last.__cause__ or last.__context__
        if not isinstance(caught, Exception) or not _is_because_of(last, caught):
            return None
        if type(caught).__name__ not in _ONLY_EXITS:
            return caught
        last = caught


def _is_because_of(error: BaseException, caught: BaseException) -> bool:
    """Return whether an exception was raised to end what handled another one.

    A handler may start something long that ends for its own reason. So the handler, or a library
    that it called, must have raised it, or a function that was given the exception or its text.
    """
    if caught is error.__cause__:
        return True
    handler = caught.__traceback__ and caught.__traceback__.tb_frame
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if handler not in frames:
        return False
    frames = frames[frames.index(handler) :]
    if len(frames) == 1 or not any(is_own_file(frame.f_code.co_filename) for frame in frames):
        return True
    return _is_among(caught, [*frames[1].f_locals.values()])


def _is_among(error: BaseException, values: Sequence[object]) -> bool:
    text = _get_text(error)
    return any(one is error or (text and isinstance(one, str) and text in one) for one in values)


def exit_status(error: BaseException) -> int:
    """Return the status, 0 to 255, with which Python would end after this exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code = error.code if isinstance(error, SystemExit) else FAILED
    return (code or 0) & 0xFF if isinstance(code, (int, type(None))) else FAILED


def _program_frames(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    before = {main.__code__.co_filename, runpy.run_path.__code__.co_filename}
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in before and not name.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    return trace


def _show(error: BaseException) -> None:
    """Print the traceback as Python would, by the program's own excepthook if set."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # a broken hook
        sys.__excepthook__(type(error), error, error.__traceback__)


def _refuse(error: Exception) -> int:
    _complain(f"run_wrapper: {error}")
    write_record(error, USAGE)
    return USAGE


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _record_path() -> Optional[Path]:
    job_dir = os.environ.get("STAGER_JOB_DIR")
    return Path(job_dir, "failures", f"{_read_number('RANK')}.json") if job_dir else None


def forget_record() -> None:
    """Remove what an earlier attempt of this rank left, when torchrun has restarted it."""
    if path := _record_path():
        with contextlib.suppress(OSError):  # mostly absent
            path.unlink()


def write_record(error: BaseException, status: int) -> None:
    """Write the failure record (see the top of this file) by one rename."""
    if not (path := _record_path()):
        return
    caught = _find_caught(error)
    error = caught or error
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    lines = keep_own_frame(text.splitlines(), RECORDED_LINES)
    if caught and not any(map(is_own_frame, lines)):
        lines = []  # an error in how the program was called: what it printed tells more
    record = {
        "v": 1,
        "node": os.environ.get("STAGER_NODE") or os.uname().nodename,
        "rank": _read_number("RANK"),
        "local_rank": _read_number("LOCAL_RANK"),
        "pid": os.getpid(),
        "exit_code": status,
        "exception": "SystemExit" if isinstance(error, SystemExit) else type(error).__name__,
        "message": _get_text(error)[:RECORDED_CHARACTERS],
        "lines": lines,
        "time": time.time(),
        **describe_state(error),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
    except OSError as problem:
        _complain(f"run_wrapper: the failure record {path} could not be written: {problem}")


def keep_own_frame(lines: Sequence[str], count: int) -> list[str]:
    """Return the last ``count`` (3 or more) lines after the last frame of the user's own code."""
    own = [at for at, line in enumerate(lines) if is_own_frame(line)]
    if not own or own[-1] >= len(lines) - count:
        return list(lines[-count:])
    return [*lines[own[-1] : own[-1] + 2], *lines[2 - count :]]


def is_own_frame(line: str) -> bool:
    """Return whether a line of a traceback names a file of the user's own code."""
    frame = _FRAME.match(line)
    return is_own_file(frame[1]) if frame else False


def is_own_file(name: str) -> bool:
    """Return whether a file of code is neither a library's, nor built in, nor this wrapper."""
    return not _NOT_OWN.search(name)


def _get_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # the program's own class, in which anything may go wrong
        return f"<no message: {type(problem).__name__} in __str__>"


# --- What the program was at when it failed ------------------------------------------------------

# No code of the program is called: ``__repr__`` or a property may raise, hang, or change something.
# So only values of Python's own types are shown, and of arrays what C code knows about them.

STATE_FRAMES, STATE_VARIABLES, STATE_CHARACTERS = 3, 20, 120
_ITEMS, _DEPTH, _INT_BITS = 8, 3, 256
# By their ids: a metaclass of the program may compare in its own way.
_SCALARS = {id(kind) for kind in (bool, float, complex, type(None))}
_TEXTS = {id(str), id(bytes)}
_SERIES = {id(list): "[]", id(tuple): "()", **dict.fromkeys(map(id, (set, frozenset, dict)), "{}")}
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_NUMBERS, _MOST_PROGRESS = {id(int), id(float)}, 1 << 53
_PROGRESS = (
    *("global_step", "step", "iteration", "iter_num", "it", "batch_idx", "epoch", "epochs_run"),
)


def describe_state(error: BaseException) -> dict[str, object]:
    """Return the fields of a record that say what the program was at; none if that fails."""
    with contextlib.suppress(Exception):  # the failure itself must be recorded
        frames = list(traceback.walk_tb(error.__traceback__))[::-1]
        own = [frame for frame in frames if is_own_file(frame[0].f_code.co_filename)]
        return {
            "variables": [_describe_frame(*frame) for frame in own[:STATE_FRAMES]],
            "step": _find_progress(own) or _find_progress(frames),
            "seeds": _read_seeds(),
        }
    return {}


def _describe_frame(frame: types.FrameType, number: int) -> dict[str, object]:
    found = _read_locals(frame)
    used = set(re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, number)))
    names = [name for name in found if not name.startswith("__")]
    names = [name for name in names if not issubclass(type(found[name]), _CODE)]
    names.sort(key=lambda name: name not in used)  # those of the line itself first
    values = [_describe_value(name, found[name]) for name in names[:STATE_VARIABLES]]
    more = len(names) - len(values)
    return {"place": _name_place(frame, number), "values": values, "more": more}


def _name_place(frame: types.FrameType, number: int) -> str:
    return f"{frame.f_code.co_filename}:{number} {frame.f_code.co_name}"


def _read_locals(frame: types.FrameType) -> dict[str, Any]:
    found: Any = frame.f_locals
    # The body of a class may have a mapping of the program's own.
    is_plain = type(found) is dict or type(found).__name__ == "FrameLocalsProxy"
    items = dict(found).items() if is_plain else ()
    return {name: value for name, value in items if type(name) is str}


def _describe_value(name: str, value: object) -> dict[str, str]:
    kind = _name_type(value)
    text = _show_value(value, _DEPTH).removeprefix(kind).lstrip()
    if len(text) > STATE_CHARACTERS:
        text = text[: STATE_CHARACTERS - 5]
        # Between items: a part of a secret would not be found.
        whole = text.rpartition(", ")[0] if id(type(value)) in _SERIES else ""
        text = f"{whole}, ..." if whole else f"{text}..."
    return {"name": name, "type": kind, "text": text}


def _name_type(value: object) -> str:
    return type(value).__name__[:STATE_CHARACTERS]


def _show_value(value: Any, depth: int) -> str:  # noqa: ANN401
    kind, name = type(value), _name_type(value)
    if id(kind) in _SCALARS or (kind is int and value.bit_length() <= _INT_BITS):
        return repr(value)
    if id(kind) in _TEXTS:
        cut = f"... ({len(value)})" if len(value) > STATE_CHARACTERS else ""
        return repr(value[:STATE_CHARACTERS]) + cut
    if id(kind) in _SERIES:
        return _show_series(value, depth)
    if kind is int:
        return f"{name} of {value.bit_length()} bits"
    return f"{name} {repr(str(value)) if kind is type(Path()) else _show_array(value)}".rstrip()


def _show_series(value: Any, depth: int) -> str:  # noqa: ANN401
    kind, size = type(value), len(value)
    if not depth:
        return f"{_name_type(value)} of {size}"
    items = itertools.islice(value.items() if kind is dict else value, _ITEMS)
    if kind is dict:
        parts = [f"{_show_value(key, 0)}: {_show_value(item, depth - 1)}" for key, item in items]
    else:
        parts = [_show_value(item, depth - 1) for item in items]
    parts += [f"... ({size})"] if size > _ITEMS else []
    return f"{_SERIES[id(kind)][0]}{', '.join(parts)}{_SERIES[id(kind)][1]}"


def _show_array(value: Any) -> str:  # noqa: ANN401
    """Return element type, shape and device of a tensor or an array, never what is in it."""
    if str(type(value).__module__).partition(".")[0] not in ("torch", "numpy"):
        return ""
    torch = sys.modules.get("torch")
    guard = getattr(getattr(torch, "_C", None), "DisableTorchFunction", contextlib.nullcontext)
    with contextlib.suppress(Exception), guard():  # no array, or one that is not made yet
        dtype = str(value.dtype).rpartition("torch.")[2][:40]
        parts = (dtype, str(list(map(int, value.shape))), str(getattr(value, "device", "")))
        return " ".join(filter(None, parts))
    return ""


def _find_progress(frames: Iterable[tuple[types.FrameType, int]]) -> dict[str, float]:
    progress: dict[str, float] = {}
    for frame, _ in frames:
        found = _read_locals(frame)
        for name in _PROGRESS:
            value: Any = found.get(name)
            if id(type(value)) in _NUMBERS and abs(value) < _MOST_PROGRESS:
                progress.setdefault(name, value)
    return progress


def _read_seeds() -> dict[str, str]:
    seeds = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "")}
    generator = getattr(sys.modules.get("torch"), "initial_seed", None)
    with contextlib.suppress(Exception):  # a torch that is half imported
        seeds.update(torch=str(generator()) if generator else "")
    return {name: seed for name, seed in seeds.items() if seed}


# --- How far the rank is, for the node's agent ---------------------------------------------------

# Each message is one JSON line into the named pipe ``$STAGER_JOB_DIR/output/ranks``::
#
#     {"event": "started", "rank": 3, "local_rank": 1, "pid": 4242, "time": 1700000000.0}
#     {"event": "left", ...}         it has destroyed PyTorch's default process group
#     {"event": "joined", ...}       it is in one again
#     {"event": "finished", ..., "status": 0, "joined": true}    true if it was ever in a group
#     {"event": "lingers", ..., "threads": ["thread saver"]}     STAGER_LINGER_SECONDS later

LINGER_SECONDS, NAMED, NAME_LENGTH = 30.0, 8, 60
OTHERS = ("horovod", "mpi4py")  # packages by which ranks meet without PyTorch's process groups
GROUPS = "torch.distributed.distributed_c10d"  # makes and destroys process groups


def send_event(event: str, **more: object) -> None:
    """Tell the node's agent, if it listens, how far this rank is."""
    if not (job_dir := os.environ.get("STAGER_JOB_DIR")):
        return
    own = {"rank": _read_number("RANK"), "local_rank": _read_number("LOCAL_RANK")}
    message = {"event": event, **own, "pid": os.getpid(), "time": time.time(), **more}
    line = json.dumps(message) + "\n"
    with contextlib.suppress(OSError):  # nobody listens, or not now: a rank does not wait for that
        pipe = os.open(Path(job_dir, "output", "ranks"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())  # short enough to come in one piece, see pipe(7)
        finally:
            os.close(pipe)


def has_joined_group() -> Optional[bool]:
    """Return whether the program has ever joined a process group; None if it meets otherwise."""
    if "torch" not in sys.modules or any(name in sys.modules for name in OTHERS):
        return None
    module = sys.modules.get(GROUPS)
    # ``_backend`` is set by the first ``init_process_group``, and stays set (torch 2.13).
    return module is not None and getattr(module, "_backend", "unknown") is not None


class _GroupsFinder:
    """Marks the spec of the module of process groups, which the other finders find."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> Optional[ModuleSpec]:
        if fullname != GROUPS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if type(spec) is ModuleSpec:
            spec.__class__ = _Marked
        return spec


class _Marked(ModuleSpec):
    """A spec that detects the end of its import, which the import system notes on it."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            super().__setattr__("__class__", ModuleSpec)
            if module := sys.modules.get(self.name):
                follow_groups(module)


def follow_groups(groups: types.ModuleType) -> None:
    """Report when a rank leaves or joins the default group; an unknown PyTorch is unchanged."""
    functions = vars(groups)
    names = ("destroy_process_group", "init_process_group")
    if {*names, "is_initialized"} <= functions.keys():
        for name in names:
            functions[name] = _report_change(functions[name], functions["is_initialized"])


def _report_change(change: Callable[..., Any], is_member: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def report(*args: object, **kwargs: object) -> object:
        before = is_member()
        try:
            return change(*args, **kwargs)
        finally:
            after = is_member()
            if after != before:
                send_event("joined" if after else "left")

    return report


def end_watch(status: int) -> None:
    """Say what keeps the process if it goes on for long though its program has finished."""
    send_event("finished", status=status, joined=has_joined_group())
    # No such number, or no more threads: then nobody watches.
    with contextlib.suppress(ValueError, RuntimeError):
        seconds = float(os.environ.get("STAGER_LINGER_SECONDS", LINGER_SECONDS))
        threading.Thread(target=_report_lingering, args=(seconds,), daemon=True).start()


def _report_lingering(seconds: float) -> None:
    time.sleep(max(0.0, seconds))
    names = find_lingering()
    why = f"waits for {', '.join(names)}" if names else "its exit handlers do not come to an end"
    rank, node = _read_number("RANK"), os.environ.get("STAGER_NODE") or os.uname().nodename
    line = f"stager: rank {rank} on {node} has ended its program, but its process goes on"
    line += f" {seconds:g} s later: {why}\n"
    # Not through sys.stderr: the interpreter may end at any moment, and must not find it locked.
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="replace"))
    send_event("lingers", threads=names)


def find_lingering() -> list[str]:
    """Return the names of what keeps the process: threads that are no daemons, child processes."""
    threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
    pools = sys.modules.get("multiprocessing.process")
    kinds = {"thread": threads, "process": list(getattr(pools, "_children", ()))}
    found = [(kind, one) for kind, all_ones in kinds.items() for one in all_ones if not one.daemon]
    return [f"{kind} {one.name[:NAME_LENGTH]}" for kind, one in found][:NAMED]


# --- Where the rank is, for the node's agent when all ranks are silent ---------------------------

# In ``$STAGER_JOB_DIR/watch``, ``RANK.sock`` gives each client lines of JSON: the stacks of all
# threads, and PyTorch's process groups with their last collectives, as PyTorch records them::
#
#     {"stacks": [{"name": "main", "frames": ["/path/loader.py:88 read_shard", ...]}, ...]}
#     {"groups": [{"name": "1", "desc": "mesh_tp", "ranks": [0, 2], "backends": "cpu:gloo"}, ...]}
#     {"entries": [...], ...}
#
# While a thread holds the GIL there is no answer. Then the signal ``SIGRTMAX - 3`` appends the
# stack of the main thread to ``RANK.stacks``, whose first line is its descriptor in this process;
# of running threads faulthandler cannot read the stacks without crashes. PyTorch's own server
# (``_WorkerServer``) starts a thread a CPU, and ends the process if one cannot be started.

STACKS = signal.SIGRTMAX - 3
RECORDS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # torch 2.13: of Gloo, and of NCCL
DEPTH, ANSWER_SECONDS = 500, 2.0


def answer_questions() -> None:
    """Say where this rank is, if the node's agent watches: at a signal, and through a socket."""
    job_dir = os.environ.get("STAGER_JOB_DIR")
    if not job_dir or os.environ.get("STAGER_WATCH") != "1":
        return
    path = os.path.join(job_dir, "watch", str(_read_number("RANK")))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # then there are no stacks
            file = os.open(f"{path}.stacks", flags, 0o600)
            os.write(file, f"{file}\n".encode())
            faulthandler.register(STACKS, file, all_threads=False, chain=False)
        with contextlib.suppress(OSError, RuntimeError):  # then nobody is answered
            _thread.start_new_thread(_answer, (_listen(f"{path}.sock"),))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(path: str) -> socket.socket:
    """Listen on a Unix socket whose path may be longer than such an address can be."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier attempt of this rank
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"/proc/self/fd/{descriptor}/{name}")
        server.listen(8)
        return server
    finally:
        os.close(descriptor)


def _answer(server: socket.socket) -> None:
    own = os.fstat(server.fileno())
    with contextlib.suppress(OSError):
        while os.path.samestat(own, os.fstat(server.fileno())):
            try:
                _answer_client(server.accept()[0])
            except Exception:  # the client has gone; there is no descriptor; another PyTorch
                time.sleep(1.0)
    server.detach()  # the program has closed it, and may have another file there


def _answer_client(client: socket.socket) -> None:
    with client:
        client.settimeout(ANSWER_SECONDS)
        client.sendall(json.dumps({"stacks": list_stacks()}).encode() + b"\n")
        groups = list_groups()
        client.sendall(json.dumps({"groups": groups}).encode() + b"\n")
        records = vars(sys.modules["torch._C._distributed_c10d"]) if groups else {}
        for name in filter(records.__contains__, RECORDS):
            client.sendall(records[name]() + b"\n")


def list_stacks() -> list[dict[str, object]]:
    """Return the stacks of all threads but this one, without a lock that one may hold."""
    threads = dict(getattr(threading, "_active", {}))
    names = {ident: str(vars(thread).get("_name", "")) for ident, thread in threads.items()}
    main = threading.main_thread().ident
    names[main] = "main"
    stacks: list[dict[str, object]] = []
    for ident, innermost in sorted(sys._current_frames().items(), key=lambda one: one[0] != main):
        if ident != threading.get_ident():
            frames = itertools.islice(traceback.walk_stack(innermost), DEPTH)
            places = [_name_place(*frame) for frame in frames]
            stacks.append({"name": names.get(ident) or f"{ident:#x}", "frames": places})
    return stacks


def list_groups() -> list[dict[str, object]]:
    """Return PyTorch's process groups of this rank; what this uses of torch 2.13 is not public."""
    world: Any = vars(sys.modules.get(GROUPS, types)).get("_world")
    return [
        {
            "name": name,
            "desc": getattr(group, "group_desc", ""),
            "ranks": sorted(world.pg_group_ranks.get(group, ())),
            "backends": str(world.pg_backend_config.get(group, "")),
        }
        for group, name in (list(world.pg_names.items()) if world is not None else ())
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
