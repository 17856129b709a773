"""A tiny package in the place of torch, whose launcher starts ranks and waits for them."""

from __future__ import annotations

from tests.support.building import Project
from tests.support.wheelhouse import make_wheel

LAUNCHER = """\
import os, subprocess, sys

def main():
    options, rest = {}, list(sys.argv[1:])
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0)[2:].partition("=")
        options[name] = value
    each, node = int(options["nproc-per-node"]), int(options["node-rank"])
    ranks = []
    for local in range(each):
        env = {
            **os.environ,
            "RANK": str(node * each + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(each * int(options["nnodes"])),
            "MASTER_ADDR": options["master-addr"],
            "MASTER_PORT": options["master-port"],
        }
        ranks.append(subprocess.Popen([sys.executable, *rest], env=env))
    return max(abs(rank.wait()) for rank in ranks)

if __name__ == "__main__":
    sys.exit(main())
"""
TORCH = {
    "torch/__init__.py": "__version__ = '2.13.0'\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": LAUNCHER,
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/agent/__init__.py": "",
    "torch/distributed/elastic/agent/server/__init__.py": "",
    "torch/distributed/elastic/agent/server/local_elastic_agent.py": "",
    "torch/distributed/elastic/rendezvous/__init__.py": "",
    "torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py": "",
}


def with_small_torch(project: Project, program: str, more: str = "") -> Project:
    make_wheel(project.root.parent / "wheelhouse", "torch", "2.13.0", files=TORCH)
    (project.root / "train.py").write_text(program)
    launch = f'torch-backend = "none"\n[launch]\nbackend = "gloo"\n{more}'
    project.settings("alpha", "torch", more=launch).build()
    return project
