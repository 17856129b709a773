"""Imports of an environment's packages, in which Python's collector waits until they are done.

This file is also copied into every environment as ``_stager_imports.py``, beside a
``_stager_imports.pth`` with :data:`PTH_LINE`: every interpreter of the environment activates it. So
it stands alone, and loads nothing that is not loaded anyway.

An import makes objects that stay; for PyTorch the collector would take a sixth of the time. While a
package of the environment is imported it begins only after :data:`PATIENCE` objects. Modules from
elsewhere may run for hours. ``STAGER_IMPORTS=0`` leaves everything as it is.
"""

from __future__ import annotations

import gc
import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any
else:
    ModuleSpec = type(sys.__spec__)

PTH_LINE = (
    'import os; os.environ.get("STAGER_IMPORTS") != "0" and '
    '__import__("_stager_imports").activate()'
)
"""The one line of ``_stager_imports.pth``; :mod:`site` executes lines that begin with import."""
PATIENCE = 1_000_000  # more objects than were freed, until a collection during an import
MANY = 10_000  # an import of more objects spares the next collection from looking at them
OFTEN = 100  # no more often than this: each time, the next full collection is put off


def activate() -> None:
    """Import packages beside this file this way; may be called any number of times."""
    finders: list[Any] = sys.meta_path
    if any(getattr(finder, "waits_for_stager", False) for finder in finders):
        return
    for place, finder in enumerate(finders):
        if _finds_files(finder):
            finders.insert(place, _Finder())
            os.register_at_fork(after_in_child=_patience.end)
            return


class _Finder:
    """A finder before that of files; marks the specs of packages that the others return."""

    # Recognised by this mark, not by its class: a test may load this file under two names.
    waits_for_stager = True

    def __init__(self) -> None:
        here = os.path.dirname(os.path.abspath(__file__))
        names = {here, os.path.realpath(here), os.path.join(sys.prefix, "pkgs")}
        self._places = tuple(os.path.join(name, "") for name in names)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if _patience.busy:  # what an import imports in turn is a part of it
            return None
        finders: list[Any] = sys.meta_path
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        for finder in behind:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if type(spec) is ModuleSpec and (spec.origin or "").startswith(self._places):
                    spec.__class__ = _Marked
                return spec
            if _finds_files(finder):  # whoever comes after it is asked by the import system
                return None
        return None


def _finds_files(finder: object) -> bool:
    return getattr(finder, "__name__", "") == "PathFinder"


class _Marked(ModuleSpec):
    """A spec while its module is imported: the import system notes begin and end of that on it.

    So no function of ours is called around the module's code, or named in its tracebacks.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and value:
            _patience.begin(self)
        elif name == "_initializing":
            _patience.end(self)
            super().__setattr__("__class__", ModuleSpec)


class _Patience:
    """The garbage collector's threshold, raised for one import at a time."""

    def __init__(self) -> None:
        self._importing = allocate_lock()
        self._spec: ModuleSpec | None = None
        self._before = gc.get_threshold()
        self._count = 0
        self._frozen = gc.get_freeze_count()  # Python 3.12 begins with some
        self._often = 0

    @property
    def busy(self) -> bool:
        return self._importing.locked()

    def begin(self, spec: ModuleSpec) -> None:
        """Raise the threshold, unless the program has its own setting."""
        before = gc.get_threshold()
        is_usual = gc.isenabled() and 0 < before[0] < PATIENCE
        if not is_usual or not self._importing.acquire(blocking=False):
            return
        try:
            self._before, self._count, self._spec = before, gc.get_count()[0], spec
            gc.set_threshold(PATIENCE, *before[1:])
        except BaseException:  # Ctrl-C
            self.end()
            raise

    def end(self, spec: ModuleSpec | None = None) -> None:
        """Restore the threshold; without a spec for any import, as after a fork."""
        if not self.busy or (spec is not None and spec is not self._spec):
            return
        self._spec = None
        if gc.get_threshold() == (PATIENCE, *self._before[1:]):  # else the package wants another
            if spec is not None:
                self._move_to_oldest_generation()
            gc.set_threshold(*self._before)
        self._importing.release()

    def _move_to_oldest_generation(self) -> None:
        """Put the many objects of an import where only a full collection looks, by ``unfreeze``."""
        many = gc.get_count()[0] - self._count > MANY and self._often < OFTEN
        if many and gc.isenabled() and gc.get_freeze_count() <= self._frozen:
            self._often += 1
            gc.freeze()
            gc.unfreeze()


_patience = _Patience()
