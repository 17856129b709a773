"""Patterns that are compiled when they are first used: each is one, and works as another."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import re

import pytest

import bundle
import stager
from bundle.regex import compile_lazily


def test_every_one_of_the_product_compiles() -> None:
    for package in (bundle, stager):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    patterns = [each for each in gc.get_objects() if type(each) is compile_lazily]
    assert len(patterns) > 200
    for each in patterns:
        assert each.groups >= 0, each.pattern


def test_it_is_used_as_a_compiled_one() -> None:
    lazy, usual = compile_lazily(r"(?P<a>x)\d", re.I), re.compile(r"(?P<a>x)\d", re.I)
    assert (lazy.pattern, lazy.flags) == (usual.pattern, usual.flags)
    assert lazy.sub("-", "aX1") == lazy.sub("-", "ax2") == "a-"
    assert lazy.fullmatch("X2")["a"] == "X"
    with pytest.raises(re.error):
        compile_lazily("(").match("")
