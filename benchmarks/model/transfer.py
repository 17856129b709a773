"""Simulations of one file on its way to all nodes: by the relay's two trees, or by ``sbcast``.

They follow ``bundle/transfer``: chunks in the order of each tree, pulled from the parent, handed on
once they are there as a whole, and unpacked as soon as nothing before them is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from bundle.driver.forecast import BLOCK, WIDEST, best_width, levels
from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED
from bundle.transfer import relay_chunks
from bundle.transfer.relay_chunks import choose_chunk_size

from .events import Clock, Process, Processors, Queue

CHUNKS = 64
"""Chunks that are simulated of a file of more than twice as many: each stands for several."""
WINDOW = 4
"""Chunks of a connection that the buffers of both ends hold: some MiB."""
TURN = 0.005
"""Seconds that a process has a processor for, where all nodes share those of one machine."""
FRAME = 4 << 20
"""Bytes of a bundle that are unpacked as one: 16 MB of content, compressed."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The machines of a job."""

    nodes: int
    """The number of nodes, 1 or more."""
    link: float = math.inf
    """Bytes a second of each node's link, in each direction; infinite where nothing limits it."""
    source_link: float = 0.0
    """The same of the driver's host; 0 for that of the nodes."""
    latency: float = 20e-6
    """Seconds from one node to another."""
    cpus: int = 16
    """CPUs of a node, or of the machine that all of them share."""
    processes: int = 0
    """Processes that unpack on each node; 0 for one a CPU."""
    shared: bool = False
    """True if all nodes, and the driver, share the CPUs of one machine."""
    disk: float = math.inf
    """Bytes a second that a node's disk takes; infinite for memory."""


@dataclass(frozen=True, kw_only=True)
class StagingCosts:
    """The speed of the programs, in CPU seconds unless said otherwise."""

    receive_byte: float
    """For a relay to take in a byte: receive, check, and write it."""
    receive_chunk: float
    """For a relay to take in a chunk besides."""
    send_byte: float
    """For a relay to pass on a byte."""
    send_chunk: float
    """For a relay to pass on a chunk besides."""
    start: float
    """Seconds from the driver's word to the first chunk, whatever the number of nodes."""
    join: float
    """For a node to take part: to read its place, connect, and prove that it knows the token."""
    efficiency: float
    """The share of a link's bytes that are content of the file."""
    unpack_byte: float
    """For a byte that is unpacked: decompressed, checked and written."""
    unpack_file: float
    """For a file that is made."""
    environment: float
    """For an environment besides."""


@dataclass(frozen=True)
class Staged:
    """The end of a transfer, in seconds from its beginning."""

    sent: float
    """Until the last byte has arrived on the last node."""
    unpacked: float
    """Until the last node has its environment."""


@cache
def relay(
    work: StagingWork,
    site: Site,
    costs: StagingCosts,
    *,
    chunks: int = CHUNKS,
    window: int = WINDOW,
) -> Staged:
    """Return the end of a relay's transfer, unpacked on all nodes while it goes on.

    Args:
        work: the bytes and files of each node.
        site: the machines.
        costs: the speed of the programs.
        chunks: the number of chunks that are simulated of a large file.
        window: the chunks of a connection that are on their way at a time.
    """
    if not work.sent:
        return Staged(0.0, 0.0)
    real = -(-work.sent // choose_chunk_size(work.sent))
    if real <= 2 * chunks:
        return _Relay(work, site, costs, real, window).run()
    # The time to fill the trees is that of a chunk on each level, so a coarse chunk's excess is in
    # proportion to its size: two runs show how much it is.
    fine = _Relay(work, site, costs, chunks, window).run()
    coarse = _Relay(work, site, costs, chunks // 2, window).run()
    excess = 1 - chunks / real
    return Staged(
        fine.sent - (coarse.sent - fine.sent) * excess,
        fine.unpacked - (coarse.unpacked - fine.unpacked) * excess,
    )


@dataclass
class _Flow:
    """A connection: one tree's chunks from a parent to a child."""

    tree: int
    parent: _Host
    child: _Host
    next: int = 0
    unconfirmed: int = 0


@dataclass
class _Host:
    """The source, or a node."""

    process: Process
    out: Queue
    into: Queue
    disk: Queue
    have: list[int]
    unpackers: list[Process]
    children: tuple[list[_Flow], ...] = field(default_factory=lambda: ([], []))
    units_ready: int = 0
    units_begun: int = 0
    units_done: int = 0
    sent: float = 0.0
    unpacked: float = 0.0


class _Relay:
    """One simulation."""

    def __init__(
        self, work: StagingWork, site: Site, costs: StagingCosts, chunks: int, window: int
    ) -> None:
        self._work, self._site, self._costs, self._window = work, site, costs, window
        self._clock = Clock()
        self._count = max(relay_chunks.TREES, chunks)
        self._size = work.sent / self._count
        self._real = self._size / choose_chunk_size(work.sent)
        """Chunks of the file that one of the simulation stands for."""
        self._totals = [
            (self._count - tree + 1) // relay_chunks.TREES for tree in range(relay_chunks.TREES)
        ]
        self._per_unit = max(1, round(FRAME / self._size))
        self._units = -(-self._count // self._per_unit)
        self._common = Processors(self._clock, site.cpus, TURN) if site.shared else None
        source_link = site.source_link or site.link
        self._hosts = [self._host(source_link, 0, self._totals)]
        processes = site.processes or site.cpus
        for _ in range(site.nodes):
            self._hosts.append(self._host(site.link, processes, [0] * relay_chunks.TREES))

    def _host(self, link: float, processes: int, have: Sequence[int]) -> _Host:
        processors = self._common or Processors(self._clock, self._site.cpus)
        rate = link * self._costs.efficiency
        return _Host(
            process=Process(processors),
            out=Queue(self._clock, rate),
            into=Queue(self._clock, rate),
            disk=Queue(self._clock, self._site.disk),
            have=list(have),
            unpackers=[Process(processors) for _ in range(processes)],
        )

    def run(self) -> Staged:
        """Connect the trees, let everything happen, and return the end."""
        for position in range(1, self._site.nodes + 1):
            for tree in range(relay_chunks.TREES):
                above = relay_chunks.find_parent(position, self._site.nodes, tree)
                flow = _Flow(tree, self._hosts[above], self._hosts[position])
                self._clock.at(self._costs.start, partial(self._join, flow))
        self._clock.run()
        nodes = self._hosts[1:]
        return Staged(max(node.sent for node in nodes), max(node.unpacked for node in nodes))

    def _join(self, flow: _Flow) -> None:
        """Let a node connect to a parent, at half of what it costs it to take part."""

        def connected() -> None:
            flow.parent.children[flow.tree].append(flow)
            self._offer(flow)

        flow.child.process.do(self._costs.join / relay_chunks.TREES, connected)

    def _offer(self, flow: _Flow) -> None:
        """Let the parent send the chunks that it has, as far as buffers have room."""
        costs = self._costs
        seconds = costs.send_byte * self._size + costs.send_chunk * self._real
        while flow.unconfirmed < self._window and flow.next < flow.parent.have[flow.tree]:
            flow.next += 1
            flow.unconfirmed += 1
            flow.parent.process.do(seconds, partial(self._send, flow))

    def _send(self, flow: _Flow) -> None:
        flow.parent.out.begin(self._size, partial(self._carry, flow))

    def _carry(self, flow: _Flow) -> None:
        """Carry a chunk from the moment that its first byte is on the parent's link."""
        now, latency = self._clock.now, self._site.latency
        link = (self._site.link, self._site.source_link or self._site.link)
        slowest = link[flow.parent is self._hosts[0]] * self._costs.efficiency
        left = now + self._size / slowest
        arrived = flow.child.into.take(self._size, now + latency)
        self._clock.at(max(arrived, left + latency), partial(self._receive, flow))

    def _receive(self, flow: _Flow) -> None:
        costs = self._costs
        seconds = costs.receive_byte * self._size + costs.receive_chunk * self._real
        flow.child.process.do(seconds, partial(self._have, flow))

    def _have(self, flow: _Flow) -> None:
        """Note a chunk that is there as a whole."""
        node = flow.child
        node.have[flow.tree] += 1
        flow.unconfirmed -= 1
        self._offer(flow)
        for below in node.children[flow.tree]:
            self._offer(below)
        node.disk.take(self._size, self._clock.now)
        prefix = min(have * relay_chunks.TREES + tree for tree, have in enumerate(node.have))
        if node.have == self._totals:
            node.sent, prefix = self._clock.now, self._count
        whole = prefix == self._count
        node.units_ready = self._units if whole else prefix // self._per_unit
        self._unpack(node)

    def _unpack(self, node: _Host) -> None:
        """Give what has come to the processes that are idle."""
        work, costs = self._work, self._costs
        content = costs.unpack_byte * work.bytes + costs.unpack_file * work.files
        while node.units_begun < node.units_ready and node.unpackers:
            node.units_begun += 1
            process = node.unpackers.pop()
            process.do(content / self._units, partial(self._write, node, process))

    def _write(self, node: _Host, process: Process) -> None:
        written = node.disk.take(self._work.bytes / self._units, self._clock.now)
        if written <= self._clock.now:
            self._written(node, process)
        else:
            self._clock.at(written, partial(self._written, node, process))

    def _written(self, node: _Host, process: Process) -> None:
        node.unpackers.append(process)
        node.units_done += 1
        if node.units_done == self._units:
            process.do(self._costs.environment, partial(self._finish, node))
        else:
            self._unpack(node)

    def _finish(self, node: _Host) -> None:
        node.unpacked = self._clock.now


# --- sbcast --------------------------------------------------------------------------------------


def broadcast_block(nodes: int, width: int, link: float, exchange: float) -> float:
    """Return the seconds of one block of ``sbcast``, until every node has acknowledged it.

    A sender passes the block on to ``width`` nodes at a time, which share its link; each of these
    serves ``width`` further nodes in turn, as long as there are any.

    Args:
        nodes: the number of nodes.
        width: nodes that each sender serves.
        link: bytes a second of each link.
        exchange: seconds for a node to take in a block and to acknowledge it.
    """
    seconds = 0.0
    while nodes:
        served = min(width, nodes)
        seconds += served * BLOCK / link + exchange
        rounds, rest = divmod(nodes - served, width * width)
        nodes = rounds * width + min(width, rest)
    return seconds


def sbcast(work: StagingWork, site: Site, costs: StagingCosts) -> Staged:
    """Return the end of a transfer by ``sbcast``: one block after the other, then the unpacking.

    The CPU time that it takes is not counted, which favours it.
    """
    width = best_width(site.nodes, WIDEST)  # as the driver chooses it
    link = (site.source_link or site.link) * costs.efficiency
    full, rest = divmod(work.sent, BLOCK)
    blocks = full + rest / BLOCK
    block = broadcast_block(site.nodes, width, link, ASSUMED.exchange)
    last = ASSUMED.exchange * levels(site.nodes, width) * (1 - rest / BLOCK) if rest else 0.0
    sent = ASSUMED.broadcast + blocks * block + last
    content = costs.unpack_byte * work.bytes + costs.unpack_file * work.files
    processes = min(site.processes or site.cpus, site.cpus)
    unpacking = content * (site.nodes if site.shared else 1) / processes
    tail = unpacking / max(1.0, blocks) + costs.environment
    written = (work.bytes + work.sent) / site.disk
    return Staged(sent, max(sent + tail, unpacking + costs.environment, written))
