"""Bytecode made at build time: used as it is on every node, and the same bytes on every machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.values import Target
from stager.layers.bytecode import bytecode_path, compile_module, worth_compiling
from tests.support.building import HOST

SOURCE = b"""
'''A module.'''
import os as operating_system

def greet(name: str = "x", count: int = 1_000_000_007) -> str:
    return f"hello {name}" if name in {"x", "y", "z"} else (1.5, b"-", "a", "ab-c")[3]
"""


def compiled_elsewhere(before, env):
    code = (
        f"import sys\n{before}\nfrom stager.layers.bytecode import compile_module\n"
        f"sys.stdout.buffer.write(compile_module({SOURCE!r}, 'm.py'))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        check=True,
    ).stdout


def test_the_header_says_never_to_look_at_the_source():
    data = compile_module(SOURCE, "m.py")
    assert data is not None
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert data[4:8] == b"\x01\0\0\0"
    assert data[8:16] == importlib.util.source_hash(SOURCE)


@pytest.mark.parametrize(
    ("before", "env"),
    [
        ("", {}),
        ("", {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1", "PYTHONOPTIMIZE": "2"}),
        ("import asyncio, unittest.mock; compile('greet = name = x = 1', 'x', 'exec')", {}),
        ("keep = [sys.intern(c) for c in ('x', 'y', 'a', 'greet', 'operating' + '_system')]", {}),
    ],
)
def test_what_the_process_did_before_does_not_show(before, env):
    assert compiled_elsewhere(before, env) == compile_module(SOURCE, "m.py")


@pytest.mark.parametrize(
    "source",
    [
        b"print 'two'\n",
        b"{{ template }} =\n",
        b"\0",
        b"# coding: nonsense\n",
        b"\xff\xfe",
        b"(" * 999,
        b"f=" + b"lambda:" * 1500 + b"1",  # compiles, and is too deep for marshal
    ],
)
def test_what_does_not_compile_is_left_alone(source):
    assert compile_module(source, "m.py") is None


def test_its_place_is_where_the_interpreter_looks():
    assert bytecode_path("a/b.py", HOST) == importlib.util.cache_from_source("a/b.py")
    other = Target(python="3.13", platform=HOST.platform)
    assert bytecode_path("lib/x.y.py", other) == "lib/__pycache__/x.y.cpython-313.pyc"


@pytest.mark.parametrize(
    ("path", "worth"),
    [
        ("pandas/core/frame.py", True),
        ("pandas/tests/frame/test_api.py", False),
        ("tests/test_it.py", False),
        ("p/test/thing_test.py", False),
        ("p/tests/__init__.py", True),  # packages do import what lies beside the tests
        ("p/tests/conftest.py", True),
        ("p/tests/helpers.py", True),
        ("numpy/testing/test_utils.py", True),
        ("p/test_util.py", True),
        ("p/attests/test_x.py", True),
    ],
)
def test_test_modules_of_test_suites_get_no_bytecode(path, worth):
    assert worth_compiling(path) is worth
