"""The program that describes an environment: it runs in it, under the environment's own Python.

:mod:`bundle.checks.probe` gives its text to ``python -c``, so it stands alone. It reads one JSON
object from its standard input, ``{"root", "packages", "imports", "deep"}``, and writes one to its
standard output, ``{"python", "prefix", "packages", "origins", "problems", "warnings"}``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import operator
import os
import re
import sys
import sysconfig
import traceback
import types
from importlib.machinery import ModuleSpec

_MODULE = re.compile(r"^([A-Za-z_]\w*)(?:/__init__)?(?:\.[\w-]+)*\.(?:py|so),", re.MULTILINE)
"""A module at the top of a distribution, as a line of RECORD names it."""
_SITE = ("site-packages", "dist-packages")  # not of the standard library
_LINKED = (
    *("_bz2", "_ctypes", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_zstd"),
    *("binascii", "pyexpat", "zlib"),
)
"""Modules of the standard library that need shared libraries and that a job may import."""


class _Environment:
    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.packages: dict[str, str | None] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[dict[str, object]] = []
        self.warnings: list[dict[str, object]] = []
        self._unloadable: dict[str, tuple[list[str], list[str]]] = {}
        """By the loader's words: standard modules that do not load, and what fails without them."""
        names = ("stdlib", "platstdlib")
        paths = (os.path.realpath(sysconfig.get_path(name)) for name in names)
        self._standard = {os.path.join(path, "") for path in paths}

    def check_package(self, name: str) -> None:
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            self.packages[name] = None
            self._problem("package-missing", name, root=self.root)
            return
        self.packages[name] = dist.version
        path = str(dist.locate_file(""))
        if not self._is_inside(path):
            self._problem("package-foreign", name, found=path)
        for module in sorted(set(_MODULE.findall(dist.read_text("RECORD") or ""))):
            spec = _find_spec(module)
            if spec is None:
                self._problem("package-incomplete", name, module=module)
            else:
                self._check_origin(module, spec)

    def check_libraries(self) -> None:
        for module in _LINKED:
            try:
                importlib.import_module(module)
            except Exception as exc:
                if getattr(exc, "path", None):  # of an ImportError by the dynamic loader
                    self._unloadable.setdefault(str(exc), ([], []))[0].append(module.lstrip("_"))

    def check_import(self, module: str, *, deep: bool) -> None:
        """Look a module up; import it if ``deep`` is true, or a shared library may prevent it."""
        spec = _find_spec(module)
        if spec is None:
            self._problem("module-missing", module, python=sys.executable)
            return
        if module not in self.origins:
            self._check_origin(module, spec)
        if deep or self._unloadable:
            self._import(module, deep=deep)

    def report_libraries(self) -> None:
        """Report each unloadable library: a problem only where an import needs it."""
        for words, (modules, importers) in self._unloadable.items():
            library, _, why = words.partition(": ")
            values = {
                "why": why,
                "modules": ", ".join(modules),
                "importers": ", ".join(importers) or "no module of environment.imports",
            }
            found = self.problems if importers else self.warnings
            found.append({"code": "library-unusable", "where": library, "values": values})

    def _import(self, module: str, *, deep: bool) -> None:
        # The last such line names a module whose import ends the process.
        sys.stderr.write(f"importing {module}\n")
        sys.stderr.flush()
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as exc:
            said = traceback.format_exception(type(exc), exc, exc.__traceback__)
            causes = [why for why in self._unloadable if why in "".join(said)]
            for why in causes:
                self._unloadable[why][1].append(module)
            if deep and not causes:
                self._problem("module-not-imported", module, why=said[-1].strip())

    def _check_origin(self, module: str, spec: ModuleSpec) -> None:
        origin = [spec.origin] if spec.has_location and spec.origin else []
        paths = origin or list(spec.submodule_search_locations or ())
        if not paths:
            return
        self.origins[module] = paths[0]
        outside = [path for path in paths if not self._is_inside(path)]
        if outside:
            self._problem("module-foreign", module, found=outside[0])

    def _is_inside(self, path: str) -> bool:
        real = os.path.join(os.path.realpath(path), "")
        within = [os.path.relpath(real, each) for each in self._standard if real.startswith(each)]
        is_standard = bool(within) and within[0].split(os.sep)[0] not in _SITE
        return is_standard or real.startswith(os.path.join(self.root, ""))

    def _problem(self, code: str, where: str, **values: str) -> None:
        self.problems.append({"code": code, "where": where, "values": values})


def _find_spec(module: str) -> ModuleSpec | None:
    """Find a module, and the packages it is in, without importing any."""
    path: list[str] | None = None
    spec, name = None, ""
    stubs: list[str] = []
    try:
        for part in module.split("."):
            name = f"{name}.{part}" if name else part
            spec = _ask_finders(name, path)
            if spec is None:
                return None
            path = list(spec.submodule_search_locations or ())
            if name not in sys.modules:  # a namespace package looks for its parent there
                stubs.append(name)
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = path
    finally:
        for name in stubs:
            del sys.modules[name]
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Ask the finders but setuptools', which cannot be imported after that (pypa/pip#8761)."""
    asked = (one for one in sys.meta_path if type(one).__module__ != "_distutils_hack")
    finders = (getattr(finder, "find_spec", None) for finder in asked)
    return next(filter(None, (find(name, path) for find in finders if find)), None)


def _report(line: str) -> None:
    with contextlib.suppress(KeyError, OSError), open(os.environ["STAGER_PROGRESS"], "a") as file:
        file.write(line)


def main() -> None:
    """Answer the request on standard input, and end the process."""
    # Imported modules may print, which must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    read_request = operator.itemgetter("root", "packages", "imports", "deep")
    root, packages, imports, is_deep = read_request(json.load(sys.stdin))
    environment = _Environment(root)
    sys.path[:] = [entry for entry in sys.path if entry]  # "" is the working directory, by -c
    sys.path.append(os.path.join(environment.root, "project"))
    environment.check_libraries()
    for name in packages:
        environment.check_package(name)
    for number, module in enumerate(imports, start=1):
        _report(f"importing {module} {number} {len(imports)}\n")
        environment.check_import(module, deep=is_deep)
    environment.report_libraries()
    facts = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "prefix": sys.prefix,
        "packages": environment.packages,
        "origins": environment.origins,
        "problems": environment.problems,
        "warnings": environment.warnings,
    }
    json.dump(facts, answer)
    answer.flush()
    os._exit(0)  # some libraries crash or hang while they are torn down; the answer stands


if __name__ == "__main__":
    main()
