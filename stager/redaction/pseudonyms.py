"""Pseudonyms for people and machines: the same one for the same name, everywhere."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence

from .spans import Span

_HOME = re.compile(rb"(?<![\w.])/(?:home|Users|export/home|data/home|u)/([A-Za-z_][\w.-]{0,63})")
_MAIL = re.compile(
    rb"(?<![\w.+-])[A-Za-z0-9_][\w.+-]{0,63}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
)
_IP4 = re.compile(rb"(?<![\w.+-])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w-]|\.[0-9])")
_IP6 = re.compile(
    rb"(?<![\w:.])(?=[0-9a-fA-F:]{7,39}(?![\w:]))[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}"
)
_VERSION = re.compile(
    rb"(?:[=<>~!]=|\b(?:version|release|nvidia|cuda|cudnn|cu[0-9]{2}|driver)[\w-]{0,40})"
    rb"[\"']?[ \t]{0,40}[:=(,]{0,2}[ \t]{0,9}[\"']?\Z|\bv\Z",
    re.I,
)
"""Before a number of four parts that is a version and no address."""
_URL_HOST = re.compile(rb"://(?:[^\s/@\"'<>]{0,200}@)?([A-Za-z0-9][A-Za-z0-9.-]{1,120})")
_DOMAIN = (
    rb"(?:(?:\.[A-Za-z][A-Za-z0-9-]{0,62}){0,5}"
    rb"\.(?:com|org|net|edu|gov|mil|int|local|localdomain|internal|cluster|lan|intra|corp|home"
    rb"|[a-z]{2})\b(?!\.\w))?"
)
_EDGE = rb"(?![A-Za-z0-9])"
_RANGE = rb"[0-9]{0,6}\[[0-9,-]{1,2000}\]"
"""The end of a list of hosts as Slurm writes it: ``hpc[07-09,12]``."""
_PUBLIC = (
    b"pytorch.org", b"huggingface.co", b"github.com",
    b"githubusercontent.com", b"python.org", b"nvidia.com", b"anaconda.org", b"readthedocs.io",
    b"localhost", b"example.org", b"example.com", b"wandb.ai", b"schedmd.com",
)  # fmt: skip
_NOBODY = frozenset(
    b"root user users admin home shared data public nobody lost+found all local test ubuntu "
    b"runner node login none slurm work main".split()
)
_COMMON_HOSTS = frozenset(b"localhost localhost.localdomain".split())
_MIN_NAME = 3
"""Letters of a user's name that is hidden."""


class Pseudonyms:
    """Replaces names of users, hosts and addresses by numbers, in the order they are met.

    Attributes:
        learned: the number of users met that were not known at first.
    """

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self.learned = 0
        self._given: dict[tuple[str, bytes], bytes] = {}
        self._users = [user.encode() for user in users if _is_name(user.encode())]
        for user in self._users:
            self._pseudonym("user", user)
        self._user_pattern = _pattern_of(self._users, _EDGE)
        self._hosts = list(dict.fromkeys(_short_hosts(hosts)))
        for host in self._hosts:
            self._pseudonym("node", host)
        self._host_pattern = _pattern_of(self._hosts, _EDGE + _DOMAIN)
        self._range_pattern = _pattern_of(_stems(self._hosts), _RANGE)

    def spans(self, text: bytes) -> Iterator[Span]:
        """Find all names in a text, each with its pseudonym."""
        for kind, start, end in self._names(text):
            pseudonym = self._pseudonym(kind, _normalized(kind, text[start:end]))
            yield Span(start=start, end=end, kind=kind, anchor=start, pseudonym=pseudonym)

    def met(self) -> list[str]:
        """Return all names of users that are known by now."""
        return [user.decode() for user in self._users]

    def _names(self, text: bytes) -> Iterator[tuple[str, int, int]]:
        """Yield kind, start and end of each name."""
        for home in _HOME.finditer(text):
            self._meet(home[1])
            if home[1] in self._users:
                yield "user", *home.span(1)
        yield from _matches(text, "user", self._user_pattern)
        yield from _matches(text, "node", self._host_pattern)
        yield from _matches(text, "node", self._range_pattern)
        if b"@" in text:
            yield from _matches(text, "email", _MAIL)
        if b"://" in text:
            yield from self._hosts_of_urls(text)
        yield from _addresses(text)

    def _hosts_of_urls(self, text: bytes) -> Iterator[tuple[str, int, int]]:
        for match in _URL_HOST.finditer(text):
            host = match[1].rstrip(b".").lower()
            known = host.endswith(_PUBLIC) or host.partition(b".")[0] in self._hosts
            if not known and not _IP4.fullmatch(host):
                yield "host", match.start(1), match.start(1) + len(host)

    def _meet(self, user: bytes) -> None:
        """Learn a name from a home directory: it is hidden from then on, wherever it stands."""
        if user not in self._users and _is_name(user):
            self._users.append(user)
            self._user_pattern = _pattern_of(self._users, _EDGE)
            self.learned += 1

    def _pseudonym(self, kind: str, name: bytes) -> bytes:
        if b"[" in name:
            return b"node-[...]"
        key = kind, name
        if key not in self._given:
            number = 1 + sum(given == kind for given, _ in self._given)
            self._given[key] = _numbered(kind, number)
        return self._given[key]


def _normalized(kind: str, name: bytes) -> bytes:
    if kind == "node":
        return name.partition(b".")[0]
    return name if kind == "user" else name.lower()


def _numbered(kind: str, number: int) -> bytes:
    if kind == "user":
        return b"USER" if number == 1 else b"USER-%d" % number
    if kind == "email":
        return b"person-%d@example.org" % number
    return kind.encode() + b"-%d" % number


def _matches(
    text: bytes, kind: str, pattern: re.Pattern[bytes] | None
) -> Iterator[tuple[str, int, int]]:
    if pattern is None:
        return
    for match in pattern.finditer(text):
        if not match[0].startswith(b"git@"):
            yield kind, *match.span()


def _addresses(text: bytes) -> Iterator[tuple[str, int, int]]:
    for match in _IP4.finditer(text):
        before = text[max(0, match.start() - 64) : match.start()]
        if _is_address(match[0]) and not _VERSION.search(before):
            yield "ip", *match.span()
    if text.count(b":") > 1:
        for match in _IP6.finditer(text):
            if _is_address(match[0]):
                yield "ip", *match.span()


def _is_name(user: bytes) -> bool:
    return len(user) >= _MIN_NAME and user.lower() not in _NOBODY


def _short_hosts(hosts: Iterable[str]) -> Iterator[bytes]:
    for host in hosts:
        bare = host.partition(".")[0].encode()
        if bare and bare not in _COMMON_HOSTS:
            yield bare


def _pattern_of(names: Iterable[bytes], behind: bytes) -> re.Pattern[bytes] | None:
    """Return a pattern for the names, longer ones first, and what follows; None for no names."""
    listed = sorted(names, key=lambda name: (-len(name), name))
    any_of = b"|".join(map(re.escape, listed))
    return re.compile(rb"(?<![A-Za-z0-9])(?:" + any_of + rb")" + behind) if listed else None


def _stems(hosts: Sequence[bytes]) -> set[bytes]:
    return {host.rstrip(b"0123456789") for host in hosts} - set(hosts) - {b""}


def _is_address(text: bytes) -> bool:
    try:
        address = ipaddress.ip_address(text.decode())
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or text.startswith(b"255."))
