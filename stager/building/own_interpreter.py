"""The Python that a project's bundle brings, if the settings ask for one."""

from __future__ import annotations

from collections.abc import Callable

from ..config.load import Config
from ..config.sections import OF_NODE
from ..interpreter import BundledInterpreter, bundled, find
from ..lock.spec import Spec


def own_interpreter(
    config: Config, spec: Spec, note: Callable[[str], None]
) -> BundledInterpreter | None:
    """Return the Python that goes into the bundle; None where the nodes' own is used.

    Raises:
        StagerError: there is none that fits, or it cannot be shipped.
    """
    setting = config.environment.interpreter
    if setting == OF_NODE:
        return None
    own = bundled(find(setting, spec.target), spec.target, spec.prune)
    if own.foreign:
        note(own.note())
    return own
