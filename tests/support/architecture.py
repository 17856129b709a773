"""The rules of the house as functions: parsed modules in, a list of violations out."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ORDER = {
    "bundle": (
        "regex", "redaction", "protocol", "system", "channel", "format", "node", "environment",
        "checks", "transfer", "results", "launch", "agent", "driver", "__main__",
    ),
    "stager": (
        "core", "hub", "config", "lock", "wheels", "layers", "interpreter", "pack", "trust",
        "building", "inventory", "slurm", "catalogue", "logs", "diagnosis", "jobs", "tracing",
        "incidents", "forecast", "cleanup", "carrying", "redaction", "support", "report",
        "pipeline", "api", "console", "cli", "__main__",
    ),
    "trainer": ("config", "network", "data", "engine", "workloads", "__main__"),
}  # fmt: skip
"""The packages of each side: one imports only itself and those before it."""

# The decompressor: in the standard library from Python 3.14, before that in the bundle itself.
FAR_SIDE_EXCEPTIONS = {"compression", "zstandard"}
PROCESS_STARTERS = (
    "bundle.system.processes",
    "stager.carrying.install_program",  # runs alone, where nothing of this package is
)
TERMINAL = ("typer", "click", "rich")
ENVIRONMENT_ONLY = ("torch", "transformers", "datasets", "numpy", "accelerate")
SHARED_BY_TESTS = ("support", "torture")
PICKLES = ("pickle", "cPickle", "_pickle", "shelve", "dill", "cloudpickle")


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed source file, with its dotted name and its path in the repository."""

    name: str
    path: str
    text: str
    tree: ast.Module
    is_package: bool = False  # whether it is a package's ``__init__``, which has the package's name

    @property
    def side(self) -> str:
        return self.name.partition(".")[0]

    @property
    def stem(self) -> str:
        """The second part of the name: ``lock`` of ``stager.lock`` and of ``stager.lock.uv``."""
        return self.name.partition(".")[2].partition(".")[0]

    def at(self, node: ast.AST, what: str) -> str:
        """A violation at a place in this file."""
        return f"{self.path}:{getattr(node, 'lineno', 1)} {what}"


class Import(NamedTuple):
    """One import statement's reach: the absolute module and the names taken from it."""

    node: ast.stmt
    module: str
    names: tuple[str, ...]
    relative: bool


def parse(name: str, text: str, *, path: str = "", is_package: bool = False) -> Module:
    shown = path or name.replace(".", "/") + ".py"
    tree = ast.parse(text, filename=shown)
    return Module(name=name, path=shown, text=text, tree=tree, is_package=is_package)


def load(repo: Path, package: str) -> list[Module]:
    found = []
    for file in sorted((repo / package).rglob("*.py")):
        relative = file.relative_to(repo)
        parts = relative.with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = file.read_text(encoding="utf-8")
        found.append(parse(name, text, path=relative.as_posix(), is_package=is_package))
    return found


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, inside functions too, with relative ones made absolute."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node, alias.name, (), relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                kept = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
                base = ".".join([*kept, *([base] if base else [])])
            names = tuple(alias.name for alias in node.names)
            yield Import(node, base, names, relative=bool(node.level))


def reached(one: Import, known: set[str]) -> set[str]:
    """The modules that an import loads: ``from . import a`` loads ``a`` where that is a module."""
    inner = {f"{one.module}.{name}" for name in one.names} & known
    return inner or {one.module}


Rule = Callable[[Iterable[Module]], list[str]]
Known = Mapping[str, Module]


def _of_imports(check: Callable[[Module, Import, Known], str]) -> Rule:

    @functools.wraps(check)
    def rule(modules: Iterable[Module]) -> list[str]:
        known = {module.name: module for module in modules}
        pairs = [(module, one) for module in modules for one in imports(module)]
        said = [(module, one, check(module, one, known)) for module, one in pairs]
        return [module.at(one.node, what) for module, one, what in said if what]

    return rule


@_of_imports
def wrong_arrows(module: Module, one: Import, known: Known) -> str:
    """stager may import bundle, bundle and trainer nothing of ours; terminals only in the CLI."""
    allowed = {"stager": {"stager", "bundle"}, "bundle": {"bundle"}, "trainer": {"trainer"}}
    top = one.module.partition(".")[0]
    if top in {"stager", "bundle", "trainer", "tests"} - allowed[module.side]:
        return f"{module.side} imports {one.module}"
    if module.side == "stager" and top in ENVIRONMENT_ONLY:
        return f"the tool imports {top}"
    shows = module.stem.startswith(("cli", "console"))
    if module.side == "stager" and top in TERMINAL and not shows:
        return f"{top} outside cli and console"
    return ""


@_of_imports
def imports_between_tests(module: Module, one: Import, known: Known) -> str:
    targets = [f"tests.{name}" for name in one.names] if one.module == "tests" else [one.module]
    shared = tuple(f"tests.{name}." for name in SHARED_BY_TESTS)
    tests = [f"{target}." for target in targets if f"{target}.".startswith("tests.")]
    wrong = [target for target in tests if not target.startswith(shared)]
    return f"imports {' '.join(wrong)}" if wrong else ""


@_of_imports
def far_side_imports(module: Module, one: Import, known: Known) -> str:
    """The far side: the standard library, and relative imports of modules that exist."""
    if not one.relative:
        standard = one.module.partition(".")[0] in {*sys.stdlib_module_names, *FAR_SIDE_EXCEPTIONS}
        return "" if standard else f"the far side imports {one.module}"
    if not one.module.startswith("bundle"):
        return "a relative import leaves the package"
    if one.module not in known:
        return f"there is no module {one.module}"
    have = _top_level_names(known[one.module]) | {name.rpartition(".")[2] for name in known}
    missing = {*one.names} - have - {"*"}
    return f"{one.module} has no {' '.join(sorted(missing))}" if missing else ""


def _top_level_names(module: Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def against_the_order(modules: Iterable[Module]) -> list[str]:
    """A package imports only itself and the packages before it; each package has a place."""
    homeless = [one for one in modules if one.stem and one.stem not in ORDER[one.side]]
    said = [f"{one.path}:1 {one.side} has no place for {one.stem}" for one in homeless]
    return said + _too_early(modules)


@_of_imports
def _too_early(module: Module, one: Import, known: Known) -> str:
    order = ORDER[module.side]
    later = order[order.index(module.stem) + 1 :] if module.stem in order else ()
    ends = tuple(f"{module.side}.{package}." for package in later)
    wrong = [name for name in sorted(reached(one, {*known})) if f"{name}.".startswith(ends)]
    return f"{module.stem} comes before what it imports: {' '.join(wrong)}" if wrong else ""


def circles(modules: Iterable[Module]) -> list[str]:
    """Modules that wait for each other while they are imported: which comes first decides."""
    modules = list(modules)
    known = {module.name for module in modules}
    try:
        graphlib.TopologicalSorter({m.name: _awaited(m, known) for m in modules}).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def _awaited(module: Module, known: set[str]) -> set[str]:
    """What must be imported before this module: its imports, and their packages but not its own."""
    later = {id(node) for node in _not_at_import(module)}
    targets = [reached(one, known) for one in imports(module) if id(one.node) not in later]
    found = set()
    for target in set().union(*targets):
        parts = target.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return {name for name in found & known if not f"{module.name}.".startswith(f"{name}.")}


def _not_at_import(module: Module) -> Iterator[ast.AST]:
    for node in ast.walk(module.tree):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                yield from ast.walk(statement)


def classes_of_one_name(modules: Iterable[Module]) -> list[str]:
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.path)
    several = [(name, paths) for name, paths in sorted(places.items()) if len(paths) > 1]
    return [f"{paths[0]}:1 {name} is also a class of {paths[1:]}" for name, paths in several]


def starts_processes(modules: Iterable[Module]) -> list[str]:
    starters = ("os.system", "os.popen", "os.spawn", "os.posix_spawn", "asyncio.create_subprocess")
    calls = [
        module.at(node, ast.unparse(node))
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(starters)
    ]
    return _imports_subprocess(modules) + calls


@_of_imports
def _imports_subprocess(module: Module, one: Import, known: Known) -> str:
    wrong = one.module.partition(".")[0] in ("subprocess", "pty")
    return f"imports {one.module}" if wrong and module.name not in PROCESS_STARTERS else ""


@_of_imports
def imports_pickle(module: Module, one: Import, known: Known) -> str:
    """No pickle; ruff knows its calls alone."""
    return f"imports {one.module}" if one.module.partition(".")[0] in PICKLES else ""


def leaves_early(modules: Iterable[Module]) -> list[str]:
    """No exit outside __main__, and no half-done code."""
    found = []
    for module in modules:
        started = _when_started(module)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                found.append(module.at(node, "NotImplementedError"))
            if not module.name.endswith("__main__") and node not in started and _exits(node):
                found.append(module.at(node, "exits outside __main__"))
    return found


def _when_started(module: Module) -> set[ast.AST]:
    """What runs only when the file is the program: under ``if __name__ == "__main__"``."""
    return {
        inner
        for node in module.tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for inner in ast.walk(node)
    }


def _exits(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return node.exc is not None and ast.unparse(node.exc).startswith("SystemExit")
    exits = ("exit", "quit", "sys.exit")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in exits


def unreadable_for(modules: Iterable[Module], version: tuple[int, int]) -> list[str]:
    found = []
    for module in modules:
        try:
            ast.parse(module.text, filename=module.path, feature_version=version)
        except SyntaxError as exc:
            found.append(f"{module.path}:{exc.lineno} {exc.msg}")
    return found
