"""Ranks that leave word for each other in the store of their rendezvous, beside the process group.

When a connection between two of them is stuck, they still learn which one, and all end with the
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
"""Seconds that a rank waits for the others' word beyond what their work may take."""

_AT_ONCE = 1.0
"""Seconds in which further faults of the same step are heard, before all end."""
_LINGER = 5.0
_PLACE = re.compile(r"^\[[^\]]*:\d+\]\s*")
NETWORK_HINT = (
    "look at the network between these nodes (cable, MTU, firewall), name the interface with "
)
NETWORK_HINT += "[launch] interface in stager.toml, or leave one of them out with --exclude"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The ranks, and where they leave word for each other."""

    world: World
    store: Store
    timeout: float
    """Seconds that one step may take."""
    nodes: tuple[str, ...]
    """Each rank's node, in the order of ranks."""

    @property
    def leaders(self) -> list[int]:
        """One rank for each node, the lowest; rank 0 first."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]


def meet(world: World, timeout: float, environ: Mapping[str, str]) -> Meeting:
    """Join the rendezvous, and learn which rank is on which node.

    Args:
        world: this rank's place, from a launcher.
        timeout: seconds that ranks may take to come, and each later step.
        environ: the variables of the launcher, and STAGER_NODE or SLURMD_NODENAME.

    Raises:
        TrainerError: not all of them came.
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
            hint="see that the head node's port can be reached, and that each rank has started",
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
                hint="see its log; the first rank that failed tells why",
            ) from error
    return Meeting(world=world, store=store, timeout=timeout, nodes=tuple(nodes))


def agree(
    meeting: Meeting,
    step: str,
    fault: str,
    ranks: Sequence[int],
    longest: float = 0.0,
    hint: str = NETWORK_HINT,
) -> None:
    """Tell the others how a step went, and go on only if it went well on every rank.

    Raises:
        TrainerError: on every rank, naming the faults of all.
    """
    faults = hear(meeting, step, fault, ranks, longest)
    if faults:
        with contextlib.suppress(RuntimeError):  # rank 0 has gone: it has said so
            _linger(meeting, step, len(ranks))
        raise TrainerError("\n".join(faults), hint=hint, everywhere=True)


def hear(
    meeting: Meeting, step: str, fault: str, ranks: Sequence[int], longest: float = 0.0
) -> list[str]:
    """Tell the others how a step went, wait for their word, and return all faults.

    A fault ends the step for all, also where a rank is still stuck in it. ``longest`` is how long
    the others may take in seconds, where that is more than one step does.

    Raises:
        TrainerError: some ranks gave no word in time.
    """
    store = meeting.store
    patience = timedelta(seconds=(longest or meeting.timeout) + MARGIN)
    try:
        if fault:
            store.set(f"{step}/fault/{store.add(f'{step}/faults', 1)}", fault)
            time.sleep(_AT_ONCE)
        store.set(f"{step}/{meeting.world.rank}", "")
        if store.add(f"{step}/came", 1) == len(ranks) or fault:
            store.set(f"{step}/go", "")
        store.wait([f"{step}/go"], patience)
        count = store.add(f"{step}/faults", 0)
        faults = {store.get(f"{step}/fault/{n + 1}").decode() for n in range(count)}
    except RuntimeError as error:
        raise _silence(meeting, step, ranks, error) from error
    return sorted(faults)


def _linger(meeting: Meeting, step: str, ranks: int) -> None:
    """Let every rank read why it has to end, and rank 0 say so.

    The store may go away with rank 0, and a launcher ends all ranks when the first one has ended.
    """
    store = meeting.store
    read = store.add(f"{step}/read", 1)
    if not meeting.world.is_first:
        store.wait([f"{step}/leave"], timedelta(seconds=_LINGER))
        time.sleep(_AT_ONCE)
        return
    until = time.monotonic() + _LINGER
    while read < ranks and time.monotonic() < until:
        time.sleep(0.05)
        read = store.add(f"{step}/read", 0)
    store.set(f"{step}/leave", "")


def _silence(meeting: Meeting, step: str, ranks: Sequence[int], error: Exception) -> TrainerError:
    """Who did not give word in time."""
    try:
        silent = [rank for rank in ranks if not meeting.store.check([f"{step}/{rank}"])]
    except RuntimeError:
        silent = [0]  # the store itself, which is rank 0's or its launcher's
    nodes = ", ".join(dict.fromkeys(meeting.nodes[rank] for rank in silent))
    return TrainerError(
        f"no word from {nodes} (rank {', '.join(map(str, silent))}): {brief(error)}",
        hint="see the logs of these ranks: one of them has ended, or hangs",
        everywhere=0 not in silent,
    )


def brief(error: Exception) -> str:
    """The first line of what PyTorch says, without the place in its source."""
    first = str(error).strip().partition("\n")[0]
    return _PLACE.sub("", first)[:300]
