"""The modules that a layer provides, which a build imports to check itself."""

from __future__ import annotations

import re

from bundle.format.layer import Index

_MODULE = re.compile(r"lib/python3\.\d+/site-packages/(?P<path>.+)")
_EXTENSION = re.compile(r"(\.cpython-[\w-]+|\.abi3)?\.so$|\.py$")
_NOT_FOR_USERS = {"test", "tests", "doc", "docs", "example", "examples", "benchmarks"}


def top_modules(name: str, index: Index) -> tuple[str, ...]:
    """Return the modules that a distribution is imported by.

    The module named like the distribution, if there is one (``torch``, not ``functorch`` and
    ``torchgen``); else every public top-level module (``yaml`` of ``pyyaml``).
    """
    modules = set()
    for entry in index.files:
        match = _MODULE.fullmatch(entry.path)
        module = _top_module(match["path"]) if match else ""
        if module:
            modules.add(module)
    namesakes = {module for module in modules if module.lower().replace("_", "-") == name}
    return tuple(sorted(namesakes or filter(_is_public, modules)))


def _top_module(path: str) -> str:
    """Return the top-level module that a file in ``site-packages`` makes; empty for none."""
    first, _, rest = path.partition("/")
    if rest == "__init__.py":
        return first
    if not rest and _EXTENSION.search(first):
        return _EXTENSION.sub("", first)
    return ""


def _is_public(module: str) -> bool:
    return module.isidentifier() and not module.startswith("_") and module not in _NOT_FOR_USERS
