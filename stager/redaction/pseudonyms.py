"""Stand-ins for names of people and machines: the same one for the same name, everywhere."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

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
_PUBLIC = (
    b"pytorch.org", b"huggingface.co", b"github.com",
    b"githubusercontent.com", b"python.org", b"nvidia.com", b"anaconda.org", b"readthedocs.io",
    b"localhost", b"example.org", b"example.com", b"wandb.ai", b"schedmd.com",
)  # fmt: skip
_NOBODY = frozenset(
    b"root user users admin home shared data public nobody lost+found all local test ubuntu "
    b"runner node login none slurm work main".split()
)
_COMMON = frozenset(b"localhost localhost.localdomain".split())


class StandIns:
    """Gives names of users, hosts and addresses away for numbers, in the order they are met.

    Attributes:
        learned: how many users were met that were not known at first.
    """

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        """Take the names that are known; hosts get numbers in their order."""
        self.learned = 0
        self._given: dict[tuple[str, bytes], bytes] = {}
        self._users = [user.encode() for user in users if _is_name(user.encode())]
        for user in self._users:
            self._stand_in("user", user)
        self._words = _words(self._users)
        self._hosts: list[bytes] = []
        for host in hosts:
            bare = host.partition(".")[0].encode()
            if bare and bare not in _COMMON and bare not in self._hosts:
                self._hosts.append(bare)
                self._stand_in("node", bare)
        self._nodes = _nodes(self._hosts)
        self._ranges = _ranges(self._hosts)

    def spans(self, text: bytes) -> Iterator[Span]:
        """All names in a text, each with its stand-in."""
        for kind, start, end in self._found(text):
            name = text[start:end]
            if kind == "node":
                name = name.partition(b".")[0]
            elif kind != "user":
                name = name.lower()
            said = b"node-[...]" if b"[" in name else self._stand_in(kind, name)
            yield Span(start=start, end=end, kind=kind, anchor=start, instead=said)

    def met(self) -> list[str]:
        """All names of users that are known by now."""
        return [user.decode() for user in self._users]

    def _found(self, text: bytes) -> Iterator[tuple[str, int, int]]:
        """The kind and the place of each name."""
        for home in _HOME.finditer(text):
            self._meet(home[1])
            if home[1] in self._users:
                yield "user", *home.span(1)
        for kind, pattern in (
            ("user", self._words),
            ("node", self._nodes),
            ("node", self._ranges),
            ("email", _MAIL if b"@" in text else None),
        ):
            for found in pattern.finditer(text) if pattern else ():
                if not found[0].startswith(b"git@"):
                    yield kind, *found.span()
        for found in _URL_HOST.finditer(text) if b"://" in text else ():
            host = found[1].rstrip(b".").lower()
            known = host.endswith(_PUBLIC) or host.partition(b".")[0] in self._hosts
            if not known and not _IP4.fullmatch(host):
                yield "host", found.start(1), found.start(1) + len(host)
        for found in _IP4.finditer(text):
            before = text[max(0, found.start() - 64) : found.start()]
            if _is_address(found[0]) and not _VERSION.search(before):
                yield "ip", *found.span()
        for found in _IP6.finditer(text) if text.count(b":") > 1 else ():
            if _is_address(found[0]):
                yield "ip", *found.span()

    def _meet(self, user: bytes) -> None:
        """Learn a name from a home directory: it is hidden from then on, wherever it stands."""
        if user not in self._users and _is_name(user):
            self._users.append(user)
            self._words = _words(self._users)
            self.learned += 1

    def _stand_in(self, kind: str, name: bytes) -> bytes:
        key = kind, name
        if key not in self._given:
            number = 1 + sum(one == kind for one, _ in self._given)
            if kind == "user":
                said = b"USER" if number == 1 else b"USER-%d" % number
            elif kind == "email":
                said = b"person-%d@example.org" % number
            else:
                said = kind.encode() + b"-%d" % number
            self._given[key] = said
        return self._given[key]


def _is_name(user: bytes) -> bool:
    return len(user) >= 3 and user.lower() not in _NOBODY


def _words(users: Iterable[bytes]) -> re.Pattern[bytes] | None:
    any_of = _any_of(users)
    return re.compile(rb"(?<![A-Za-z0-9])" + any_of + rb"(?![A-Za-z0-9])") if any_of else None


def _nodes(hosts: Iterable[bytes]) -> re.Pattern[bytes] | None:
    """Known hosts, with their domain where one follows."""
    any_of = _any_of(hosts)
    whole = rb"(?<![A-Za-z0-9])" + any_of + rb"(?![A-Za-z0-9])" + _DOMAIN
    return re.compile(whole) if any_of else None


def _any_of(names: Iterable[bytes]) -> bytes:
    """A pattern for the names, longer ones first; empty for none."""
    listed = sorted(names, key=lambda name: (-len(name), name))
    return b"(?:" + b"|".join(map(re.escape, listed)) + b")" if listed else b""


def _ranges(hosts: Iterable[bytes]) -> re.Pattern[bytes] | None:
    """Lists of known hosts as Slurm writes them: ``hpc[07-09,12]``."""
    stems = {host.rstrip(b"0123456789") for host in hosts} - set(hosts) - {b""}
    if not stems:
        return None
    return re.compile(rb"(?<![A-Za-z0-9])" + _any_of(stems) + rb"[0-9]{0,6}\[[0-9,-]{1,2000}\]")


def _is_address(text: bytes) -> bool:
    """Whether it is an address that says something about a site: not the loopback's."""
    try:
        address = ipaddress.ip_address(text.decode())
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or text.startswith(b"255."))
