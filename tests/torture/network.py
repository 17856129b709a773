"""A network of this process's own: a switch and some hosts, whose links can be slow or cut.

Each host is a network namespace that only open files hold, so nothing of it outlives the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from .rounds import NotHere

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_NAMESPACE = "/proc/self/ns/net"
_NOBODY = "02:00:00:00:00:01"  # a hardware address that no host has: what is sent there is lost
_SECONDS = 300


class Network:
    """A switch with hosts; this process is at the switch, whose own address is :attr:`switch`."""

    switch = "10.77.0.1"

    def __init__(self, hosts: int, rate: str) -> None:
        """Make it, with links of a rate as ``tc`` has it; this process leaves its network for good.

        ``NotHere`` where this machine does not allow it.
        """
        self.hosts = hosts
        self._hub = _new_namespace()
        self._places: list[int] = []
        self._rate = rate
        _batch("ip", ["link set lo up", "link add hub type bridge", "link set hub up"])
        _batch("ip", [f"addr add {self.switch}/16 dev hub"])
        for host in range(hosts):
            self._places.append(_new_namespace())
            ends = f"link add eth0 type veth peer name port{host} netns /proc/{os.getpid()}/fd/"
            lines = ["link set lo up", f"{ends}{self._hub}", "link set eth0 up"]
            _batch("ip", [*lines, f"addr add {self.address(host)}/16 dev eth0"])
            _enter(self._hub)
            _batch("ip", [f"link set port{host} master hub up"])
            self.shape(host, rate)

    def address(self, host: int) -> str:
        return f"10.77.1.{host + 1}"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Let this process be on a host: what it starts and connects meanwhile stays there."""
        _enter(self._places[host])
        try:
            yield
        finally:
            _enter(self._hub)

    def shape(self, host: int, rate: str) -> None:
        shaped = "root tbf rate {} burst 32kb latency 100ms"
        _batch("tc", [f"qdisc replace dev port{host} {shaped.format(rate)}"])
        self._on(host, "tc", f"qdisc replace dev eth0 {shaped.format(rate)}")

    def cut(self, host: int) -> None:
        """Pull a host's plug out of the switch: it is told nothing, and neither are the others."""
        _batch("ip", [f"link set port{host} nomaster"])

    def mend(self, host: int) -> None:
        _batch("ip", [f"link set port{host} master hub"])

    def read_part(self, host: int, other: int) -> None:
        """Lose all that two hosts send to each other, as a firewall that drops it does."""
        for one, two in ((host, other), (other, host)):
            neighbour = f"neigh replace {self.address(two)} lladdr {_NOBODY} dev eth0 nud permanent"
            self._on(one, "ip", neighbour)

    def move(self, host: int) -> None:
        self._on(host, "ip", f"addr del {self.address(host)}/16 dev eth0")
        self._on(host, "ip", f"addr add 10.77.2.{host + 1}/16 dev eth0")

    def _on(self, host: int, program: str, line: str) -> None:
        with self.inside(host):
            _batch(program, [line])


def _new_namespace() -> int:
    """Enter a new network namespace; return the open file that holds it."""
    if _LIBC.unshare(_CLONE_NEWNET):
        raise NotHere("this machine does not let us make network namespaces")
    return os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


def _enter(handle: int) -> None:
    if _LIBC.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _batch(program: str, lines: list[str]) -> None:
    """Let ``ip`` or ``tc`` do some things; ``NotHere`` where it cannot."""
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            [program, "-batch", "-"], input="\n".join(lines), env=env, capture_output=True,
            text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
    except FileNotFoundError as exc:
        raise NotHere(f"{program} is not installed (Debian: iproute2)") from exc
    if done.returncode:
        raise NotHere(f"{program}: {lines}: {done.stderr.strip()}")
