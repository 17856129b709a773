"""Imports of an environment's packages, in which Python's collector waits until they are done.

This file is also copied into every environment as ``_stager_imports.py``, beside a
``_stager_imports.pth`` holding :data:`PTH_LINE`, so that every interpreter that starts from the
environment activates it. It therefore stands alone, and loads nothing that is not loaded anyway.

An import makes objects that stay, hundreds of thousands for PyTorch. The collector looks at them
again and again and finds next to nothing, which takes an eighth of the time. So while a package of
the environment is imported it begins only after :data:`PATIENCE` objects, and then is as it was.
Modules from elsewhere, a project's own among them, are imported as ever: they may run for hours.
``STAGER_IMPORTS=0`` leaves everything as it is.
"""

from __future__ import annotations

import gc
import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PTH_LINE = (
    'import os; os.environ.get("STAGER_IMPORTS") != "0" and '
    '__import__("_stager_imports").activate()'
)
"""The one line of ``_stager_imports.pth``; :mod:`site` executes lines that begin with import."""

PATIENCE = 1_000_000
"""After so many objects more than were freed there is a collection during an import, too."""

MANY = 10_000
"""An import that makes more objects than these spares the next collection from looking at them."""


def activate() -> None:
    """Have packages beside this file imported so; may be called any number of times."""
    finders: list[Any] = sys.meta_path
    if any(getattr(finder, "waits_for_stager", False) for finder in finders):
        return
    for place, finder in enumerate(finders):
        if getattr(finder, "__name__", "") == "PathFinder":
            finders.insert(place, _Finder(finder.find_spec))
            return


class _Finder:
    """Stands before the finder of files and gives its answers, those about packages extended."""

    # Recognised by this mark, not by its class: a test may load this file under two names.
    waits_for_stager = True

    def __init__(self, find: Callable[..., ModuleSpec | None]) -> None:
        self._find = find
        here = os.path.dirname(os.path.abspath(__file__))
        names = {here, os.path.realpath(here), os.path.join(sys.prefix, "pkgs")}
        self._places = tuple(os.path.join(name, "") for name in names)
        self._frozen = gc.get_freeze_count()  # Python 3.12 begins with some
        # Held during an import: what it imports in turn is a part of it.
        self._importing = allocate_lock()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Answer for a package's files only (the protocol of :data:`sys.meta_path`)."""
        if self._importing.locked():
            return None
        spec = self._find(fullname, path, target)
        if spec is None or not (spec.origin or "").startswith(self._places):
            return spec
        if hasattr(spec.loader, "exec_module"):
            self._extend(spec)
        return spec

    def _extend(self, spec: ModuleSpec) -> None:
        """Extend this one loader object; it stays what it is for inspect, pkgutil and resources."""
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Drop the extension first: a loader may outlive the import, or be shared by others.
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            self._patiently(execute, module)

        loader.exec_module = exec_module

    def _patiently(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        before = gc.get_threshold()
        if not 0 < before[0] < PATIENCE or not self._importing.acquire(blocking=False):
            execute(module)
            return
        patient = (PATIENCE, *before[1:])
        gc.set_threshold(*patient)
        try:
            execute(module)
        finally:
            if gc.get_threshold() == patient:  # else the package has said what it wants
                self._call_them_old()
                gc.set_threshold(*before)
            self._importing.release()

    def _call_them_old(self) -> None:
        """Put the many objects of an import where only a full collection looks; it frees them, too.

        ``unfreeze`` moves objects to the oldest generation (the manual of :mod:`gc`). Whoever has
        frozen objects on purpose keeps them frozen.
        """
        if gc.get_count()[0] > MANY and gc.get_freeze_count() <= self._frozen:
            gc.freeze()
            gc.unfreeze()
