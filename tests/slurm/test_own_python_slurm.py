"""A bundle with its own Python on nodes that have an older one only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.building import fetch_zstandard
from tests.support.cluster import Cluster
from tests.support.node_faults import only_python
from tests.support.own_pythons import movable_python, oldest_python
from tests.support.provoking import bench_for, build, instead

RANK = """\
import os, sys
print(f"[RANK {os.environ['RANK']}] {sys.version.split()[0]} {sys.base_prefix}", flush=True)
"""


@pytest.mark.full
def test_nodes_with_an_older_python_only(
    cluster: Cluster, shared: Path, pip_settings: Mapping[str, str]
) -> None:
    own = movable_python()
    version, older = own.target.python, oldest_python(own)
    wheel = fetch_zstandard(version, shared, pip_settings)
    settings = f'python = "{version}"\ninterpreter = "{own.prefix}"\n'
    root = build(shared / "own", wheel, more={"rank.py": RANK.encode()}, environment=settings)
    nothing = shared / "nothing"
    nothing.mkdir()
    bench = bench_for(cluster, root, shared)
    with ExitStack() as changed:
        for node in ("node01", "node02"):
            shell = f'exec {older.program} "$@"'
            changed.enter_context(only_python(cluster, node, shell, shared))
            changed.enter_context(instead(cluster, node, {str(own.prefix): nothing}))
        assert cluster.on("node02", ["test", "-e", str(own.program)], check=False).returncode
        said = bench.stager("run", "--nodes", "2", "--nproc-per-node", "2", "--", "rank.py")
        assert said.code == 0, said.talk
        again = bench.stager("verify", "--nodes", "2", "--deep")
    ranks = sorted(line.split() for line in bench.lines() if line.startswith("[RANK"))
    assert [rank for _, rank, *_ in ranks] == ["0]", "1]", "2]", "3]"]
    for _, _, found, prefix in ranks:
        assert found.startswith(f"{version}.")
        assert prefix.startswith("/tmp/stager-")
        assert prefix.endswith("/python")
    assert f"PY {version}" in said.talk
    assert again.code == 0, again.talk
    assert {node["python"].rpartition(".")[0] for node in again.report["nodes"]} == {version}
    bench.assert_clean()
