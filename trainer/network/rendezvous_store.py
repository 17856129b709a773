"""Messages between ranks in the store of their rendezvous, beside the process group.

If a connection between two ranks is stuck, all ranks still learn which one it is, and end with the
same message.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ..config import TrainerError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .dist import World

MARGIN = 10.0
"""Seconds that a rank waits for the others' messages beyond the time of their work."""

_AT_ONCE = 1.0
"""Seconds in which further faults of the same step are collected before all ranks end."""
_LINGER = 20.0
"""Seconds that ranks stay after a fault at most, so that all can read it: a node may be busy."""
_PLACE = re.compile(r"^\[[^\]]*:\d+\]\s*")
NETWORK_HINT = (
    "look at the network between these nodes (cable, MTU, firewall), name the interface with "
)
NETWORK_HINT += "[launch] interface in stager.toml, or leave one of them out with --exclude"


@dataclass(frozen=True, kw_only=True)
class RendezvousStore:
    """The store in which the ranks leave messages for each other."""

    world: World
    store: Store
    timeout: float
    """Seconds that one step may take."""
    nodes: tuple[str, ...]
    """Each rank's node, in the order of ranks."""

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each node; rank 0 first."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]


def meet(world: World, timeout: float, environ: Mapping[str, str]) -> RendezvousStore:
    """Join the rendezvous, and learn the node of each rank.

    Raises:
        TrainerError: not all ranks joined.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    node = environ.get("STAGER_NODE") or environ.get("SLURMD_NODENAME") or os.uname().nodename
    limit = timedelta(seconds=timeout)
    head = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    try:
        store, _, _ = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
    except (RuntimeError, ValueError) as error:
        raise TrainerError(
            f"{node} (rank {world.rank} of {world.size}) did not meet the others at {head} within "
            f"{timeout:g} s: {brief(error)}",
            hint="check that the head node's port can be reached, and that each rank has started",
        ) from error
    store = PrefixStore("meeting", store)
    store.set(f"node/{world.rank}", node)
    nodes = []
    for rank in range(world.size):
        try:
            nodes.append(store.get(f"node/{rank}").decode())
        except RuntimeError as error:
            raise TrainerError(
                f"rank {rank} of {world.size} did not come to {head} within {timeout:g} s; "
                f"known so far: {', '.join(dict.fromkeys(nodes)) or 'none'}",
                hint="see its log; that of the first rank that failed says why",
            ) from error
    return RendezvousStore(world=world, store=store, timeout=timeout, nodes=tuple(nodes))


def agree(
    rendezvous: RendezvousStore,
    step: str,
    fault: str,
    ranks: Sequence[int],
    longest: float = 0.0,
    hint: str = NETWORK_HINT,
) -> None:
    """Report the outcome of a step to the others, and continue only if every rank succeeded.

    Raises:
        TrainerError: on every rank, with the faults of all.
    """
    faults = hear(rendezvous, step, fault, ranks, longest)
    if faults:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and has reported it
            _linger(rendezvous, step, len(ranks))
        raise TrainerError("\n".join(faults), hint=hint, everywhere=True)


def hear(
    rendezvous: RendezvousStore, step: str, fault: str, ranks: Sequence[int], longest: float = 0.0
) -> list[str]:
    """Report the outcome of a step to the others, wait for theirs, and return all faults.

    A fault ends the step for all, also for a rank that is still stuck in it. ``longest`` is the
    time in seconds that the others may take, if that is more than one step takes.

    Raises:
        TrainerError: some ranks did not report in time.
    """
    store = rendezvous.store
    patience = timedelta(seconds=(longest or rendezvous.timeout) + MARGIN)
    try:
        if fault:
            store.set(f"{step}/fault/{store.add(f'{step}/faults', 1)}", fault)
            time.sleep(_AT_ONCE)
        store.set(f"{step}/{rendezvous.world.rank}", "")
        if store.add(f"{step}/came", 1) == len(ranks) or fault:
            store.set(f"{step}/go", "")
        store.wait([f"{step}/go"], patience)
        count = store.add(f"{step}/faults", 0)
        faults = {store.get(f"{step}/fault/{n + 1}").decode() for n in range(count)}
    except RuntimeError as error:
        raise _silence(rendezvous, step, ranks, error) from error
    return sorted(faults)


def _linger(rendezvous: RendezvousStore, step: str, ranks: int) -> None:
    """Wait until every rank has read the faults, and rank 0 has reported them.

    The store may end with rank 0, and a launcher ends all ranks when the first one has ended.
    """
    store = rendezvous.store
    read = store.add(f"{step}/read", 1)
    if not rendezvous.world.is_first:
        store.wait([f"{step}/leave"], timedelta(seconds=_LINGER))
        time.sleep(_AT_ONCE)
        return
    until = time.monotonic() + _LINGER
    while read < ranks and time.monotonic() < until:
        time.sleep(0.05)
        read = store.add(f"{step}/read", 0)
    store.set(f"{step}/leave", "")


def _silence(
    rendezvous: RendezvousStore, step: str, ranks: Sequence[int], error: Exception
) -> TrainerError:
    try:
        silent = [rank for rank in ranks if not rendezvous.store.check([f"{step}/{rank}"])]
    except RuntimeError:
        silent = [0]  # the store itself, which is rank 0's or its launcher's
    nodes = ", ".join(dict.fromkeys(rendezvous.nodes[rank] for rank in silent))
    return TrainerError(
        f"no word from {nodes} (rank {', '.join(map(str, silent))}): {brief(error)}",
        hint="see the logs of these ranks: one of them has ended, or hangs",
        everywhere=0 not in silent,
    )


def brief(error: Exception) -> str:
    """Return the first line of PyTorch's message, without the place in its source."""
    first = str(error).strip().partition("\n")[0]
    return _PLACE.sub("", first)[:300]
