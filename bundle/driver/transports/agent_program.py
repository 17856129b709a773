"""What a step of Slurm's is sent first: the modules that its agents need, and a request.

Slurm sends a step's standard input to each of its tasks, one by one. So the driver's modules stay
away, those of phases that the step has not, bytecode, and what only readers need of a source; and
all of it is compressed as one. On a node :mod:`bundle.channel.bootstrap` takes it.
"""

from __future__ import annotations

import binascii
import functools
import io
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from ...channel.agent_channel import PACKED
from ...environment.merge import HOOKS
from .strip_source import stripped

STRIPPED = "stripped/"
"""The folder of a program where its agents' modules lie as they are sent, if it has been made."""
DRIVERS = frozenset(
    f"bundle/{name}"
    for name in (
        *("__main__", "checks/findings", "checks/network_agreement", "format/partial_bundle"),
        *("results/publish", "results/receive", "transfer/forecast", "transfer/plan"),
    )
)
"""The modules outside ``driver/`` that no agent of a step's uses."""
OF_PHASES = {
    "collect": ("results/pack", "results/patterns"),
    "clean": ("environment/clean",),
    "deep": ("checks/reachability", "checks/deep_node", "checks/deep"),
    "launch": (
        *("launch/wrapper", "launch/watch", "launch/early_torchrun", "launch/output_reader"),
        *("launch/rank_monitor", "launch/run_ranks", "launch/rank_results"),
    ),
}
"""The modules that only agents of one phase use."""
MAIN = b"""import sys
from bundle.agent.agent import command
sys.exit(command(sys.argv[1:]))
"""
"""What runs where another Python than the bootstrap program's own is named."""


def agent_modules(program: bytes) -> dict[str, bytes]:
    """Return the modules that agents may need as they are sent, by their paths.

    Args:
        program: a node program. What has been made from it before it may hold already, as making
            it takes a third of a second.
    """
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        names = archive.namelist()
        made = {
            name[len(STRIPPED) :]: archive.read(name) for name in names if name.startswith(STRIPPED)
        }
        if made:
            return made
        modules = [name for name in names if name.startswith("bundle/") and name.endswith(".py")]
        return {
            name: _as_sent(name, archive.read(name))
            for name in modules
            if not name.startswith("bundle/driver/") and name[: -len(".py")] not in DRIVERS
        }


def _as_sent(name: str, source: bytes) -> bytes:
    # Environments hold the source of these, which must be the same whoever makes them.
    return (
        source if name in [f"bundle/environment/{hook}.py" for hook in HOOKS] else stripped(source)
    )


class Opening:
    """What steps are sent; a program is compressed once for all steps of the same phases.

    Attributes:
        bootstrap: the source of what runs first on a node.
    """

    def __init__(self, program: bytes) -> None:
        """Take the driver's own program."""
        self._modules = agent_modules(program)
        self.bootstrap = self._modules["bundle/channel/bootstrap.py"].decode()
        self._packed = functools.lru_cache(maxsize=None)(self._pack)

    def of(self, phases: Collection[str], request: Mapping[str, Any]) -> bytes:
        """Return what a step is sent that has these phases, and this request first."""
        program = self._packed(frozenset(phases))
        asked = zlib.compress(json.dumps(request).encode(), 9)
        return b"%d %d\n" % (len(program), len(asked)) + program + asked

    def _pack(self, phases: frozenset[str]) -> bytes:
        left = {
            f"bundle/{name}.py"
            for phase, names in OF_PHASES.items()
            if phase not in phases
            for name in names
        }
        sent = {"__main__.py": MAIN, **self._modules}
        return compressed({name: sent[name] for name in sorted(sent.keys() - left)})


def compressed(modules: Mapping[str, bytes]) -> bytes:
    """Return modules as the bootstrap program takes them: a line of names and sizes, then all."""
    head = json.dumps([[name, len(data)] for name, data in modules.items()]).encode()
    return zlib.compress(head + b"\n" + b"".join(modules.values()), 9)


def line(request: Mapping[str, Any]) -> str:
    """Return a further request as a line: compressed where that is shorter."""
    text = json.dumps(request)
    packed = PACKED + binascii.b2a_base64(zlib.compress(text.encode(), 9), newline=False).decode()
    return min(text, packed, key=len)


def shortened(requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what nodes are asked, with what is the same for all written once: they may be many."""
    every = list(requests.values())
    common = {
        key: value
        for key, value in every[0].items()
        if key not in ("node", "node_rank")  # an agent knows these
        and all(key in other and other[key] == value for other in every)
    }
    own = {
        node: {
            key: value
            for key, value in request.items()
            if key not in common and key not in ("node", "node_rank")
        }
        for node, request in requests.items()
    }
    return {"common": common, "own": {node: extra for node, extra in own.items() if extra}}
