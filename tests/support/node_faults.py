"""Faults of one node of a real cluster: ports that are taken, another Python, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bundle.driver.transports.agent_program import PYTHONS
from tests.support.building import HOST
from tests.support.cluster import Cluster
from tests.support.failing import remounted
from tests.support.provoking import instead

LISTEN = """\
import socket, sys
kept = []
for port in range(int(sys.argv[1]), int(sys.argv[2])):
    kept.append(socket.create_server(("", port)))
print("listening", flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(cluster: Cluster, node: str, first: int, end: int) -> Iterator[None]:
    argv = [*cluster.entering(node), sys.executable, "-c", LISTEN, str(first), str(end)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taking:
        assert taking.stdout is not None
        assert taking.stdout.readline() == b"listening\n"
        yield
        taking.communicate()


@contextmanager
def only_python(cluster: Cluster, node: str, shell: str, shared: Path) -> Iterator[None]:
    """Put a shell script in the place of every Python that could be found on a node."""
    stand_in = shared / "python"
    stand_in.write_text(f"#!/bin/sh\n{shell}\n")
    stand_in.chmod(0o755)
    names = {*PYTHONS, f"python{HOST.python}", "python"}
    folders = [*os.environ["PATH"].split(":"), str(Path(sys.executable).parent), "/usr/bin"]
    folders += [str(Path(sys.base_prefix, "bin")), "/usr/local/bin"]
    found = {os.path.realpath(Path(folder, name)) for folder in folders for name in names}
    own = [path for path in sorted(found) if Path(path).is_file()]
    with instead(cluster, node, dict.fromkeys(own, stand_in)):
        yield


@contextmanager
def full_disk(cluster: Cluster, node: str) -> Iterator[str]:
    fields = ["df", "-B1", "--output=size,used", "/tmp"]
    size, used = cluster.on(node, fields).stdout.split()[-2:]
    with remounted(cluster, node, f"size={int(used) + (1 << 20)}", f"size={size}"):
        yield node
