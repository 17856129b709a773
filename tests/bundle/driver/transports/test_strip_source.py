"""What is left out of a source, and that the rest is as it was, line by line."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path
from types import CodeType

import pytest

from bundle.driver.transports.agent_program import stripped

MODULES = sorted((Path(__file__).resolve().parents[4] / "bundle").rglob("*.py"))

SOURCE = '''\
# A comment.
"""A docstring.

# no comment
"""
from __future__ import annotations
from collections.abc import Mapping, Sequence
from typing import Any, cast
from os import path, sep
import os.path

__all__ = ["sep"]
LIMIT: int = 3  # three
"""What a limit is."""
TEXT = """\\
# kept
"""
HASH = f"#{LIMIT}" + '#'  # "not" kept

class Empty(Exception):
    """Nothing."""

class Facts:
    """Facts."""
    count: int = 0
    """How many."""

    def add(self, more: Sequence[int],
            *rest: Any, limit: Mapping[str, int] | None = None, **named: object) -> dict[str, int]:
        """Add."""
        late: int
        found: dict[str, int] = {}
        found["sum"] = self.count + sum(more) + len(rest)
        return cast(dict, found) if path else {}

def fail() -> None:
    """Fail."""
    # On line 39.
    raise Empty("so")
'''


def test_what_is_left_does_the_same_on_the_same_lines() -> None:
    short = stripped(SOURCE.encode()).decode()
    assert short.count("\n") == SOURCE.count("\n")
    assert [line for line in short.split("\n") if line] == [
        "from __future__ import annotations",
        "from typing import cast",
        "from os import path, sep",
        '__all__ = ["sep"]',
        "LIMIT = 3",
        'TEXT = """\\',
        "# kept",
        '"""',
        "HASH = f\"#{LIMIT}\" + '#'",
        "class Empty(Exception):",
        "    pass",
        "class Facts:",
        "    count: int = 0",
        "    def add(self, more,",
        "            *rest, limit = None, **named) :",
        "        pass",
        "        found = {}",
        '        found["sum"] = self.count + sum(more) + len(rest)',
        "        return cast(dict, found) if path else {}",
        "def fail() :",
        '    raise Empty("so")',
    ]
    space: dict[str, object] = {}
    exec(compile(short, "short.py", "exec"), space)
    fail = space["fail"]
    assert callable(fail)
    with pytest.raises(Exception, match="so") as caught:
        fail()
    assert (
        traceback.extract_tb(caught.tb)[-1].lineno
        == SOURCE.split("\n").index('    raise Empty("so")') + 1
    )


def outline(code: CodeType) -> list[object]:
    """The functions of a compiled module with their arguments, names and first lines."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    own = (code.co_name, code.co_varnames, code.co_names, code.co_firstlineno)
    return [own, *(part for one in inner for part in outline(one))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_module_of_ours_is_the_same_without(path: Path) -> None:
    source = path.read_bytes()
    short = stripped(source)
    assert short.count(b"\n") == source.count(b"\n")
    assert stripped(short) == short
    functions = outline(compile(source, "m.py", "exec", optimize=2))[1:]
    kept = outline(compile(short, "m.py", "exec", optimize=2))[1:]
    assert kept == functions
    assert not any(
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(short))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
