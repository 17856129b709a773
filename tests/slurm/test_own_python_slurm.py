"""A bundle with its own Python on nodes with an older one, or without a library that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.building import fetch_zstandard
from tests.support.cluster import Cluster
from tests.support.missing_libraries import changes, library_of
from tests.support.node_faults import only_python
from tests.support.own_pythons import OwnPython, movable_python, oldest_python
from tests.support.provoking import Bench, bench_for, build, instead

NODES = ("node01", "node02")
RANK = """\
import os, sys
print(f"[RANK {os.environ['RANK']}] {sys.version.split()[0]} {sys.base_prefix}", flush=True)
"""


@pytest.fixture
def own() -> OwnPython:
    return movable_python()


@pytest.fixture
def older_nodes(
    cluster: Cluster, own: OwnPython, shared: Path, pip_settings: Mapping[str, str]
) -> Iterator[Bench]:
    """A project built for a Python that no node has."""
    older = oldest_python(own)
    wheel = fetch_zstandard(own.target.python, shared, pip_settings)
    settings = f'python = "{own.target.python}"\ninterpreter = "{own.prefix}"\n'
    root = build(shared / "own", wheel, more={"rank.py": RANK.encode()}, environment=settings)
    nothing = shared / "nothing"
    nothing.mkdir()
    with ExitStack() as changed:
        for node in NODES:
            shell = f'exec {older.program} "$@"'
            changed.enter_context(only_python(cluster, node, shell, shared))
            changed.enter_context(instead(cluster, node, {str(own.prefix): nothing}))
        yield bench_for(cluster, root, shared)


def test_nodes_with_an_older_python_only(older_nodes: Bench, own: OwnPython) -> None:
    bench, version = older_nodes, own.target.python
    gone = bench.cluster.on(NODES[1], ["test", "-e", str(own.program)], check=False)
    assert gone.returncode != 0
    options = ("--nodes", "2", "--nproc-per-node", "2")
    said = bench.stager("run", *options, "--", "rank.py")
    assert said.code == 0, said.talk
    ranks = sorted(line.split() for line in bench.lines() if line.startswith("[RANK"))
    assert [rank for _, rank, *_ in ranks] == ["0]", "1]", "2]", "3]"]
    for _, _, found, prefix in ranks:
        assert found.startswith(f"{version}.")
        assert prefix.startswith("/tmp/stager-")
        assert prefix.endswith("/python")
    assert f"PY {version}" in said.talk

    again = bench.stager("verify", "--nodes", "2", "--deep")
    assert again.code == 0, again.talk
    assert {node["python"].rpartition(".")[0] for node in again.report["nodes"]} == {version}
    bench.assert_clean()


@pytest.mark.full
def test_a_node_without_a_library_that_the_python_needs(
    cluster: Cluster, own: OwnPython, shared: Path, pip_settings: Mapping[str, str]
) -> None:
    """Nothing has been started there; the other node could run it."""
    wheel = fetch_zstandard(own.target.python, shared, pip_settings)
    settings = f'python = "{own.target.python}"\ninterpreter = "{own.prefix}"\n'
    settings += 'imports = ["sqlite3"]\n'
    root = build(shared / "lacking", wheel, more={"rank.py": RANK.encode()}, environment=settings)
    bench = bench_for(cluster, root, shared)
    library = library_of(str(own.program), "_sqlite3")
    with instead(cluster, NODES[0], changes(library, shared)):
        said = bench.stager("run", "--nodes", "2", "--", "rank.py")
    assert said.code == 3, said.talk
    assert "error: node01: libsqlite3.so.0: the node has no usable copy of this shared" in said.talk
    assert "needed by sqlite3 in the environment's Python, and by sqlite3" in said.talk
    assert "NODE node02 OK -> PY" in said.talk
    assert not [line for line in bench.lines() if line.startswith("[RANK")]
    bench.assert_clean()
