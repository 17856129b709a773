"""The proof that a bundle's own Python runs in another place, and finds all of itself there."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bundle.environment.listing import OWN_PYTHON, own_python
from bundle.format.manifest import PYTHON
from bundle.node import interpreter
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.protocol.problem import NodeError
from bundle.regex import compile_lazily
from bundle.system.processes import ProcessError

from .config.sections import BUNDLED, HEADERS
from .core import elf
from .core.errors import ConfigError, StagerError
from .core.files import expand_home
from .core.processes import CommandError, Runner, run, run_with_input
from .core.values import Target
from .layers.bytecode import Compiler
from .layers.source import Interpreter, LayerSource, RunPath
from .layers.tree import Collector, digest_tree
from .lock import uv

_RUN_SECONDS = 120.0
_OF_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/share/")
"""Where every Linux has what programs of any place use: glibc, locales."""
# Modules that do not import here may lack a library of this machine, which the build has named.
_PROGRAM = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.machinery, json, os, sysconfig
folder = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
endings = importlib.machinery.EXTENSION_SUFFIXES
for name in sorted(os.listdir(folder) if os.path.isdir(folder) else ()):
    if name.endswith(tuple(endings)):
        module = name.partition(".")[0]
        try:
            print("IMPORTS", module, file=sys.stderr, flush=True)
            __import__(module)
        except Exception:
            pass
with open("/proc/self/maps") as handle:
    mapped = {line.split(None, 5)[5].rstrip() for line in handle if "/" in line}
print(json.dumps({
    "places": [sys.prefix, sys.exec_prefix, folder, *sys.path],
    "mapped": sorted(mapped),
}))
"""


def list_faults_elsewhere(env_dir: Path, python: str, denied: Sequence[str] = ()) -> list[str]:
    """Start a bundle's Python behind ``denied`` (no network); return what it takes from outside."""
    top = (env_dir / OWN_PYTHON).resolve()
    program = own_python(str(env_dir), python)
    argv = [*denied, program, "-s", "-B", "-c", _PROGRAM]
    try:
        done = run_with_input(argv, "", environment={}, timeout=_RUN_SECONDS)
        said = json.loads(done.stdout)
    except CommandError as exc:
        imported = re.findall(r"^IMPORTS (.+)", exc.completed.stderr, re.MULTILINE)
        if imported:
            ended = f"exit status {exc.completed.returncode}"
            return [f"its Python ends elsewhere when it imports {imported[-1]}: {ended}"]
        return [f"its Python does not start elsewhere: {' '.join(exc.context[-1:])}"]
    except (StagerError, ValueError) as exc:
        return [f"its Python does not start elsewhere: {exc}"]
    faults = [
        f"its Python looks for modules in {place}"
        for place in said["places"]
        if not Path(place).resolve().is_relative_to(top)
    ]
    faults += [
        f"its Python uses {file}, which the nodes need not have"
        for file in said["mapped"]
        if not (file.startswith(_OF_SYSTEM) or Path(file).is_relative_to(top))
    ]
    return list(dict.fromkeys(faults))


# --- A Python of this machine that a bundle can bring: named by the user, or found ---------------

_KEY = "environment.interpreter"
_SYSTEM = (Path("/usr"), Path("/"))  # shared with all else of a distribution
_UV_SECONDS = 30.0


class Installation(NamedTuple):
    """A CPython of this machine."""

    prefix: Path
    program: str
    version: str  # its full version, ``3.12.1``

    @property
    def library(self) -> str:
        """Return the path of its standard library in the folder."""
        return f"lib/python{self.version.rpartition('.')[0]}"


class _UnusableError(ValueError):
    """A Python that a bundle cannot bring; the text says why, after its path."""


def find_interpreter(
    setting: str, target: Target, env: Mapping[str, str] = os.environ, run: Runner = run
) -> Installation:
    """Return the Python that a bundle is to bring."""
    host = Target.from_host()
    if (target.machine, target.libc[0]) != (host.machine, host.libc[0]):
        raise ConfigError(
            f"{_KEY}: the Python of this machine is for {host.machine} with {host.libc[0]}, and "
            f"the environment is for {target.machine} with {target.libc[0]}",
            hint="build on a machine of the nodes' kind, or leave the interpreter to the nodes",
        )
    is_named = setting != BUNDLED
    refused: dict[Path, str] = {}
    for path in [Path(setting)] if is_named else list_candidates(target, env, run):
        try:
            return _installation(_find_program(path, target), target, env)
        except _UnusableError as exc:
            refused.setdefault(path, f"{path} {exc}")
    reasons = list(refused.values())
    what = f"there is no Python {target.python} here that a bundle can bring"
    raise ConfigError(
        f"{_KEY}: {reasons.pop() if is_named else what}",
        hint=f"uv has Pythons that can be moved: uv python install {target.python}, then "
        f'{_KEY} = "{BUNDLED}"; or name the folder of one that pyenv (`pyenv prefix`) or conda '
        "has made",
        context=reasons,
    )


def list_candidates(target: Target, env: Mapping[str, str], run: Runner) -> Iterator[Path]:
    """Yield the programs of the target's version: uv's, pyenv's, and the one that runs this."""
    program = f"bin/python{target.python}"
    with suppress(StagerError):
        argv = [*uv.require_uv(), "python", "dir"]
        kept = Path(run(argv, timeout=_UV_SECONDS).stdout.strip())
        yield from _newest_first(kept, f"cpython-{target.python}.*", program)
    pyenv = Path(env.get("PYENV_ROOT") or expand_home("~/.pyenv"))
    yield from _newest_first(pyenv / "versions", f"{target.python}.*", program)
    if target.is_host_python:
        with suppress(NodeError):  # this one is free-threaded, or no CPython
            yield Path(interpreter.find_base_python(target.python, (), env))


def _newest_first(folder: Path, pattern: str, program: str) -> list[Path]:
    found = [path / program for path in folder.glob(pattern) if not path.is_symlink()]
    return sorted(filter(Path.is_file, found), key=_patch, reverse=True)


def _patch(program: Path) -> tuple[int, int, str]:
    """Order Pythons by the last number of the version, then uv's plain build before others."""
    name = program.parents[1].name
    number = re.match(r"(?:cpython-)?3\.\d+\.(\d+)", name)
    return int(number[1]) if number else -1, -len(name), name


def _find_program(path: Path, target: Target) -> Path:
    program = f"python{target.python}"
    for found in (path, path / "bin" / program, path / program):
        if found.is_file():
            return found
    if not path.is_dir():
        raise _UnusableError("is not there")
    raise _UnusableError(
        f"has no Python {target.python}: there is no file {path / 'bin' / program}"
    )


def _installation(path: Path, target: Target, env: Mapping[str, str]) -> Installation:
    try:
        facts = interpreter.describe_interpreter(str(path), env)
        misfit = facts.explain_misfit(target.python)
        if misfit:
            raise _UnusableError(f"is {misfit}; environment.python asks for {target.python}")
        program = Path(interpreter.find_base_program(target.python, facts, env))
    except ProcessError as exc:
        raise _UnusableError(f"does not work: {interpreter.describe_failure(exc)}") from exc
    prefix = Path(facts.base_prefix).resolve()
    if prefix in _SYSTEM:
        raise _UnusableError(
            f"belongs to the system in {prefix}, and cannot be moved from among other programs"
        )
    made = Installation(prefix=prefix, program=f"bin/{program.name}", version=facts.version)
    for part in (made.program, f"{made.library}/os.py", f"{made.library}/encodings"):
        if not (prefix / part).exists():
            raise _UnusableError(f"is not relocatable: {prefix} has no {part}")
    if not program.samefile(prefix / made.program):
        raise _UnusableError(f"is not relocatable: {program} does not lie in {prefix}")
    return made


# --- An interpreter of this machine for another version of Python than the one that runs this ----

_DESCRIBE_SECONDS = 30.0
_DESCRIBE = """\
import importlib.util, sys
print("%d.%d.%d" % sys.version_info[:3], importlib.util.MAGIC_NUMBER.hex())
"""


def find_compiler(
    target: Target, own: Path | None = None, env: Mapping[str, str] = os.environ
) -> Compiler | None:
    """Return a Python of another version to compile for a target; the processor does not matter."""
    if target.is_host_python:
        return None
    try:
        kept = [] if own else map(str, list_candidates(target, env, run))
        program = str(own or interpreter.find_base_python(target.python, [*kept], env))
        said = run([program, "-I", "-S", "-c", _DESCRIBE], timeout=_DESCRIBE_SECONDS).stdout
        version, magic = said.split()
    except (NodeError, StagerError, ValueError):  # the last: it says something else, or more
        return None
    return Compiler(program=Path(program), version=version, magic=magic)


# --- The shared libraries that a Python needs: those that go with it, those left to the nodes ----

_OF_GLIBC = compile_lazily(
    r"(ld-linux.*|libc|libm|libmvec|libdl|libpthread|librt|libutil|libresolv|libanl)\.so\.\d+"
)
_ORIGIN = compile_lazily(r"\$ORIGIN\b|\$\{ORIGIN\}")


class Libraries:
    """The shared libraries that a Python needs, besides those of glibc."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.own: dict[str, str] = {}
        self.foreign = defaultdict[str, list[str]](list)  # left to the nodes; what needs each
        self.run_paths: dict[str, RunPath] = {}  # by file
        self.glibc = (0, 0)  # the oldest glibc with which all of it runs
        self.faults: list[str] = []

    def follow(self, path: str) -> list[str]:
        """Note what a file needs; return the files in the folder that are needed only by it."""
        header = elf.read_elf(self.prefix / path)
        if header is None:
            return []
        self.glibc = max(self.glibc, header.glibc)
        known = len(self.own)
        origin = str((self.prefix / path).parent)

        def resolve(entry: str) -> Path:
            return Path(os.path.realpath(_ORIGIN.sub(lambda _: origin, entry)))

        folders = [(entry, resolve(entry)) for entry in header.run_path.split(":") if entry]
        relative = False
        for needed in header.needed:
            # Until 2025, python-build-standalone had $ORIGIN/../lib/libpython3.12.so.1.0 here.
            folder, slash, name = needed.rpartition("/")
            if _OF_GLIBC.fullmatch(name):
                continue
            searched = [resolve(folder)] if slash else [found for _, found in folders]
            place = self._find_library(searched, name)
            relative |= bool(place) and not slash
            self._note(path, needed, place)
        if relative:
            self._make_relative(path, header, folders)
        return list(self.own.values())[known:]

    def _note(self, path: str, needed: str, place: str) -> None:
        name = needed.rpartition("/")[2]
        if place:
            self.own.setdefault(name, place)
        elif name not in self.own:  # else what needs this file has loaded it
            self.foreign[needed].append(path.rpartition("/")[2])
            if needed.startswith("libpython3"):
                fault = f"{path}: it finds {needed} by LD_LIBRARY_PATH, or in the system"
                self.faults.append(fault)
        if needed.startswith(f"{self.prefix}/"):
            self.faults.append(f"{path}: it needs {needed}")

    def _find_library(self, folders: Sequence[Path], name: str) -> str:
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        is_own = found is not None and found.is_relative_to(self.prefix)
        return str(found.relative_to(self.prefix)) if found and is_own else ""

    def _make_relative(
        self, path: str, header: elf.Elf, folders: Sequence[tuple[str, Path]]
    ) -> None:
        parent = (self.prefix / path).parent
        entries = (
            entry
            if _ORIGIN.search(entry) or not folder.is_relative_to(self.prefix)
            else f"$ORIGIN/{os.path.relpath(folder, parent)}"
            for entry, folder in folders
        )
        text = ":".join(dict.fromkeys(entries))
        old, new = os.fsencode(header.run_path), os.fsencode(text)
        if len(new) > len(old):
            self.faults.append(f"{path}: its run path {header.run_path} has no room for {text}")
        elif new != old:
            self.run_paths[path] = RunPath(at=header.run_path_at, old=old, new=new)


def follow_libraries(prefix: Path, program: str, modules: Sequence[str]) -> Libraries:
    """Return the shared libraries that a Python and its extension modules need."""
    libraries = Libraries(prefix)
    queue = deque([program, *modules])
    while queue:
        queue += libraries.follow(queue.popleft())
    if libraries.faults:
        raise ConfigError(
            f"{_KEY}: the Python in {prefix} is not relocatable: it does not find its libraries",
            hint="name one that can be moved, such as those of uv: uv python install",
            context=libraries.faults,
        )
    return libraries


# --- The files of a Python that go into a bundle, as the source of a layer -----------------------

_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")
_TEST_MODULE = compile_lazily(r"_?(test|xx).*\.so|_ctypes_test\..*")  # of Python's own tests
_HINT = "make these files readable, or name another Python with environment.interpreter"


@dataclass(frozen=True, kw_only=True)
class BundledInterpreter:
    """A Python that goes into a bundle."""

    source: LayerSource
    glibc: tuple[int, int]
    foreign: Mapping[str, Sequence[str]]  # libraries left to the nodes, and what needs each
    program: Path

    def note(self) -> str:
        """Return a note on the libraries that the nodes must have for it."""
        needs = "; ".join(
            f"{name} ({re.sub(r'[.]cpython[^,]*', '', ', '.join(files))})"
            for name, files in self.foreign.items()
        )
        return (
            f"Python {self.source.version} goes into the bundle, but some of its modules need "
            f"shared libraries that the nodes must have: {needs}. stager verify finds those that a "
            "node lacks; Pythons of uv need hardly any (uv python install)"
        )


def make_bundled_interpreter(
    installation: Installation, target: Target, prune: Collection[str]
) -> BundledInterpreter:
    """Return the layer's source of a Python, and what it needs of a node."""
    prefix = installation.prefix
    try:
        _refuse_other_platform(installation, target)
        paths = [*_files(prefix, installation.library)]
        headers = installation.library.replace("lib/", "include/", 1)
        if HEADERS not in prune and (prefix / headers).is_dir():
            paths += _files(prefix, headers)
        modules = sorted(path for path in paths if path.endswith(".so"))
        libraries = follow_libraries(prefix, installation.program, modules)
    except OSError as exc:
        raise ConfigError(
            f"environment.interpreter: {exc.filename or f'a file in {prefix}'} cannot be read: "
            f"{exc.strerror}",
            hint=_HINT,
        ) from exc
    collector = Collector()
    for path in [installation.program, *paths, *sorted(libraries.own.values())]:
        collector.add(path, str(prefix / path))
    tree = collector.tree(what=f"the Python in {prefix}", hint=_HINT)
    interpreter = Interpreter(program=prefix / installation.program, run_paths=libraries.run_paths)
    digests = [Digest.of(interpreter.content(file)) for file in tree.files]
    source = LayerSource(
        kind=PYTHON,
        name="cpython",
        version=installation.version,
        digest=digest_tree(tree, digests),
        tree=tree,
        prefix=OWN_PYTHON,
        size=tree.size * 2,
        interpreter=interpreter,
    )
    return BundledInterpreter(
        source=source,
        glibc=libraries.glibc,
        foreign={name: sorted(files) for name, files in sorted(libraries.foreign.items())},
        program=interpreter.program,
    )


def _refuse_other_platform(installation: Installation, target: Target) -> None:
    program = installation.prefix / installation.program
    header = elf.read_elf(program)
    if header is None or not header.loader:
        fault = "is a script, or linked statically: it could load no extension modules of packages"
    else:
        libc = "musl" if Path(header.loader).name.startswith("ld-musl") else "glibc"
        if (header.machine, libc) == (target.machine, target.libc[0]):
            return
        fault = (
            f"is for {header.machine} with {libc}, and the environment is for {target.machine} "
            f"with {target.libc[0]}"
        )
    raise ConfigError(
        f"{_KEY}: {program} {fault}",
        hint="name a Python that the dynamic loader starts, for environment.platform",
    )


def _files(prefix: Path, top: str) -> Iterator[str]:
    """Yield the paths of the shipped files; raise OSError rather than miss a directory."""
    config = re.compile(r"config-\d.*")
    for folder, names, files in os.walk(prefix / top, onerror=_reraise, followlinks=False):
        names[:] = [name for name in names if name not in _LEFT_OUT and not config.fullmatch(name)]
        path = Path(folder).relative_to(prefix)
        dynload = path.name == "lib-dynload"
        for name in files:
            if not name.endswith((".a", ".pyc")) and not (dynload and _TEST_MODULE.fullmatch(name)):
                yield str(path / name)


def _reraise(error: OSError) -> None:
    raise error
