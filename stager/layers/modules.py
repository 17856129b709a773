"""Which modules a layer provides: what a build imports to prove itself when the user names none."""

from __future__ import annotations

import re

from bundle.format.layer import Index

_MODULE = re.compile(r"lib/python3\.\d+/site-packages/(?P<path>.+)")
_EXTENSION = re.compile(r"(\.cpython-[\w-]+|\.abi3)?\.so$|\.py$")
_NOT_FOR_USERS = {"test", "tests", "doc", "docs", "example", "examples", "benchmarks"}


def top_modules(name: str, index: Index) -> tuple[str, ...]:
    """The modules that a distribution is imported by.

    The one named like the distribution, where there is one (``torch``, not ``functorch`` and
    ``torchgen``); else every public top-level module (``yaml`` of ``pyyaml``).

    Args:
        name: the distribution's normalized name.
        index: what its layer holds.
    """
    found = set()
    for entry in index.files:
        match = _MODULE.fullmatch(entry.path)
        if match is None:
            continue
        first, _, rest = match["path"].partition("/")
        if rest == "__init__.py":
            found.add(first)
        elif not rest and _EXTENSION.search(first):
            found.add(_EXTENSION.sub("", first))
    same = {module for module in found if module.lower().replace("_", "-") == name}
    public = {
        module
        for module in found
        if module.isidentifier() and not module.startswith("_") and module not in _NOT_FOR_USERS
    }
    return tuple(sorted(same or public))
