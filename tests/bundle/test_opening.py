"""What is sent to each task: no more than agents need, and all of that."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from bundle.talking import opening
from stager.bundling.compiled import with_bytecode
from stager.bundling.program import make_node_program

BUNDLE = Path(__file__).parents[2] / "bundle"


def imported(path: Path) -> set[Path]:
    """The modules of ours that a module imports at any time, but for types only."""
    found = set()
    tree = ast.parse(path.read_text())
    typing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    for_types = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in for_types:
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        named = [base / f"{alias.name}.py" for alias in node.names]
        found |= {one for one in [base.with_suffix(".py"), *named] if one.exists()}
    return found


def test_agents_import_nothing_of_what_is_left_out() -> None:
    """Nor does anything that they import; a driver's module would be missed on a node only."""
    todo, seen = [BUNDLE / "agent.py", BUNDLE / "talking" / "hearing.py"], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imported(path)
    names = {f"bundle/{path.relative_to(BUNDLE).with_suffix('')}" for path in seen}
    assert names & opening.DRIVERS == set()
    assert len(names) > 30
    for name in opening.DRIVERS:
        assert (BUNDLE.parent / f"{name}.py").exists()


def test_it_is_about_half(tmp_path: Path) -> None:
    program = with_bytecode(make_node_program())
    sent = opening.packed(program)
    assert len(sent) < 0.6 * len(program)
    path = tmp_path / "agent.pyz"
    path.write_bytes(zlib.decompress(sent))
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        names = set(archive.namelist())
    assert {"__main__.py", "bundle/agent.py", "bundle/agent.pyc", "bundle/wrapper.py"} <= names
    assert "bundle/drive.py" not in names
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(path), "agent", "tidy"],
        input=json.dumps({"node": "n1", "job": {}}) + "\n",
        capture_output=True,
        text=True,
        env={"PATH": os.defpath},
        check=False,
    )
    assert "the job description cannot be read" in done.stderr
