"""Removal of secrets and names from a stream of bytes."""

from __future__ import annotations

import bisect
import html
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from . import secret_shapes, secret_values
from .secret_shapes import value_of
from .secret_values import KnownValues, Span, end_of, looks_random, merged

# --- A text as it reads once colours, zero bytes and escapes are gone; places map back to the text

_LEVELS = 6
"""The number of times a text may be escaped: JSON within JSON within a shell's quotes, and more."""
_ATOM = re.compile(
    rb"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[()][A-Z0-9])"
    rb"|\0|\xef\xbb\xbf|\xff\xfe|\xe2\x80[\x8b-\x8d]|\xc2[\xad\xa0]|[^\n]\x08"
    rb"|\\u00[0-7][0-9A-Fa-f]|\\u2028|\\x[0-7][0-9A-Fa-f]|\\[\"'\\/nrtb`]|\\[01][0-7]{2}"
    rb"|\\\r?\n[ \t]{0,80}|=\r?\n"
    rb"|%[0-7][0-9A-Fa-f]"
    rb"|&(?:quot|apos|amp|lt|gt|#(?:[0-9]{2,3}|x[0-9A-Fa-f]{2}));"
)
_ESCAPED_LETTERS = {b"t": b"\t", b"b": b"\b", b"n": b"\n", b"r": b"\n"}
_NO_BREAK_SPACE = b"\xc2\xa0"
_ASCII = 0x80
_MARKS = (
    b"\\",
    b"%",
    b"\x1b",
    b"\0",
    b"&",
    b"\x08",
    b"=\n",
    b"=\r\n",
    b"\xe2\x80",
    b"\xc2\xad",
    b"\xc2\xa0",
)
"""A text with none of these reads as it stands."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A text, read at one level."""

    text: bytes
    """The text as it reads."""
    under: View | None = None
    """The level that it was made from; None for the text itself."""
    starts: list[int] = field(default_factory=list)
    """The start of each piece, here."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The start of each piece in the level below, and its length there."""

    def back(self, start: int, end: int) -> tuple[int, int]:
        """Return a place here as one in the text itself."""
        if self.under is None:
            return start, end
        first = self._below(start)
        last = self._below(end - 1, whole=True) if end > start else first
        return self.under.back(first, last)

    def _below(self, at: int, *, whole: bool = False) -> int:
        """Return a byte's place in the level below; with ``whole`` the place after it."""
        number = max(0, bisect.bisect_right(self.starts, at) - 1)
        below, length = self.places[number]
        here = self.starts[number]
        is_last = number + 1 == len(self.starts)
        unchanged = is_last or self.starts[number + 1] - here == length
        if unchanged:
            return below + at - here + whole
        return below + length if whole else below


def views(text: bytes) -> Iterator[View]:
    """Yield a text itself, then what it reads as, level by level, as long as that differs."""
    view = View(text=text)
    yield view
    for _ in range(_LEVELS):
        read = _read(view)
        if read is None:
            return
        yield read
        view = read


def _read(under: View) -> View | None:
    """Return the next level; None where nothing changes."""
    text = under.text
    if not any(mark in text for mark in _MARKS):
        return None
    read = bytearray()
    starts: list[int] = []
    places: list[tuple[int, int]] = []

    def add(piece: bytes, place: int, length: int) -> None:
        starts.append(len(read))
        places.append((place, length))
        read.extend(piece)

    done = 0
    for match in _ATOM.finditer(text):
        start = match.start()
        if start > done:
            add(text[done:start], done, start - done)
        meant = _meant(text, match)
        if meant:
            add(meant, start, len(match[0]))
        done = match.end()
    if not done:
        return None
    add(text[done:], done, len(text) - done)
    return View(text=bytes(read), under=under, starts=starts, places=places)


def _meant(text: bytes, match: re.Match[bytes]) -> bytes:
    """Return what an escape stands for; nothing for a colour."""
    atom = match[0]
    if atom == b"\0":
        return _zero_byte(text, match.start())
    if atom == _NO_BREAK_SPACE:
        return b" "
    if atom.endswith(b"\x08"):  # struck out
        return b""
    if atom.startswith(b"&"):
        return html.unescape(atom.decode("ascii")).encode()
    if atom.startswith(b"%"):
        return bytes([int(atom[1:], 16)])
    return _escaped(atom[1:]) if atom.startswith(b"\\") else b""


def _zero_byte(text: bytes, at: int) -> bytes:
    """Return nothing for half of a wide letter, a line's end after a variable or an argument."""
    is_wide = text[at + 2 : at + 3] == b"\0" or text[max(0, at - 2) : at - 1] == b"\0"
    return b"" if is_wide else b"\n"


def _escaped(body: bytes) -> bytes:
    first = body[:1]
    if first in (b"\r", b"\n"):
        return b""
    if not (first in b"ux" or first.isdigit()):
        return _ESCAPED_LETTERS.get(first, first)
    code = int(body, 8) if first.isdigit() else int(body[1:], 16)
    return bytes([code]) if code < _ASCII else b"\n"


# --- Pseudonyms for people and machines: the same one for the same name, everywhere --------------

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


# --- Removal of secrets from a stream of bytes: lines keep their numbers, memory stays flat ------

# A text comes in pieces. What has been looked at goes out, but for the last part, which is looked
# at again together with what follows: so no secret is missed because it was cut in two.

BLOCK = 1 << 18
"""Bytes that go out at a time."""
HELD = 1 << 16
"""Bytes that are looked at again with what follows; no secret of a few lines is longer."""
LONGEST = 1 << 22
"""Bytes that are kept at most; of a secret that is longer the rest is taken out as it comes."""
MAX_LEARNED_BYTES = 400
"""Bytes of a value that is learned: a longer one is not repeated by chance."""
MAX_LEARNED = 500
"""Values that are learned from texts at most."""
_WIDTHS = frozenset((79, 80, 88, 99, 100, 119, 120, 132, 159, 160, 199, 200))
"""Characters of a line at which programs begin a new one, whatever it says."""
_WIDEST = 1000
_REST = re.compile(rb"(?:\r?\n[A-Za-z0-9+/_.=-]{1,200}){1,2}")
_BREAKS = b" \t,;"
_WORD_BYTES = bytes(set(range(256)) - set(b" \t\r\n\"'"))


class Finder(Protocol):
    """Finds what is to be hidden besides secrets."""

    def spans(self, text: bytes) -> Iterator[Span]:
        """Find all of it, each with its pseudonym."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The part of a stream that goes out; the rest is read for what it means."""

    start: int = 0
    """Its first byte."""
    end: int | None = None
    """The byte after its last one; None for the end of the stream."""


class _Window:
    """The part of a stream that is looked at; it grows until it can be cut between two secrets."""

    def __init__(self) -> None:
        self.data = b""
        self.start = 0
        self.wanted = BLOCK + HELD
        self.in_secret = False

    def cut(self, length: int) -> None:
        self.data = self.data[length:]
        self.start += length
        self.wanted = BLOCK + HELD

    def cut_at(self, spans: list[Span]) -> int:
        """Return how many bytes can go out; 0 where the window has to grow first."""
        length = _cut(self.data, spans)
        if length:
            return length
        if len(self.data) < LONGEST:
            self.wanted = 2 * len(self.data)
            return 0
        self.in_secret = True
        return len(self.data)

    def skip_secret(self) -> None:
        """Let go of the rest of a secret that was too long to be kept."""
        if self.in_secret:
            self.cut(len(self.data) - len(self.data.lstrip(_WORD_BYTES)))
            self.in_secret = not self.data


class Redactor:
    """Takes secrets out of texts, and counts them.

    Attributes:
        counts: the number of secrets of each kind that were taken out.
        known: values that are looked for everywhere; it learns those that a name gave away.
        learned: the number of values it has learned: what went out before may have them.
    """

    def __init__(self, known: KnownValues | None = None, others: Finder | None = None) -> None:
        self.known = known or KnownValues()
        self.counts: Counter[str] = Counter()
        self.learned = 0
        self._others = others

    def text(self, data: bytes) -> bytes:
        """Return a whole text without its secrets."""
        return b"".join(self.stream([data]))

    def words(self, text: str) -> str:
        """Return a string without its secrets."""
        how = "surrogateescape"  # a name's bytes
        try:
            data = text.encode(errors=how)
        except UnicodeEncodeError:  # half of a character, as JSON may have it
            how = "surrogatepass"
            data = text.encode(errors=how)
        return self.text(data).decode(errors=how)

    def stream(self, pieces: Iterable[bytes], kept: Kept | None = None) -> Iterator[bytes]:
        """Yield the ``kept`` part of a text that comes in pieces, without its secrets."""
        kept = kept or Kept()
        window = _Window()
        for piece in _blocks(pieces):
            window.data += piece
            if len(window.data) < window.wanted:
                continue
            window.skip_secret()
            if window.in_secret:
                continue
            spans = self._look(window.data)
            length = window.cut_at(spans)
            if length:
                yield self._redacted(window.data[:length], spans, window.start, kept)
                window.cut(length)
        window.skip_secret()
        spans = self._look(window.data)
        yield self._redacted(window.data, spans, window.start, kept)

    def find(self, text: bytes) -> list[Span]:
        """Return all that must not stay in a text, in order."""
        spans: list[Span] = []
        for view in views(text):
            spans += [_mapped_back(text, view, span) for span in self._in_view(view.text)]
        return merged(spans)

    def _look(self, text: bytes) -> list[Span]:
        """Find secrets, and again if values were learned: they may be anywhere in the text."""
        spans = self.find(text)
        before = self.learned
        for span in spans:
            if span.learned and self.learned < MAX_LEARNED:
                self.learned += self.known.add(span.learned)
        return self.find(text) if self.learned > before else spans

    def _in_view(self, text: bytes) -> Iterator[Span]:
        yield from _named_values(text)
        yield from secret_shapes.spans(text)
        for start, end in self.known.find(text):
            yield Span.at(start, end, "known-value")
        if self._others is not None:
            yield from self._others.spans(text)

    def _redacted(self, text: bytes, spans: list[Span], base: int, kept: Kept) -> bytes:
        """Return the ``kept`` bytes of a text at ``base`` in the stream, redacted."""
        stop = len(text) if kept.end is None else max(0, min(len(text), kept.end - base))
        at = max(0, kept.start - base)
        out: list[bytes] = []
        for span in spans:
            if span.end <= at or span.start >= stop:
                continue
            newlines = text.count(b"\n", max(at, span.start), min(span.end, stop))
            out.append(text[at : span.start])
            out.append(span.replacement(newlines))
            self.counts[span.kind] += 1
            at = span.end
        out.append(text[at:stop])
        return b"".join(out)


def _named_values(text: bytes) -> Iterator[Span]:
    end = 0
    for name in secret_values.names(text):
        if name.start < end:  # a part of another one's value
            continue
        value = value_of(text, name)
        if value is not None:
            end = value.end
            yield Span(
                start=value.start,
                end=value.end,
                kind=name.meaning.kind,
                anchor=name.start,
                quote=value.quote,
                learned=_worth_learning(text[value.start : value.end]),
            )


def _worth_learning(value: bytes) -> bytes:
    return value if len(value) <= MAX_LEARNED_BYTES and looks_random(value) else b""


def _mapped_back(text: bytes, view: View, span: Span) -> Span:
    start, end = view.back(span.start, span.end)
    anchor, _ = view.back(span.anchor, span.anchor + 1)
    if not span.pseudonym:
        end = _unwrapped(text, end)
    return replace(span, start=start, end=end, anchor=min(start, anchor))


def _unwrapped(text: bytes, end: int) -> int:
    """Return where a secret ends that was broken at the end of its line to fit a width."""
    if text[end : end + 1] not in (b"\n", b"\r"):
        return end
    width = end - text.rfind(b"\n", max(0, end - _WIDEST), end) - 1
    return end_of(_REST, text, end) if width in _WIDTHS else end


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            yield piece[at : at + BLOCK]


def _cut(text: bytes, spans: list[Span]) -> int:
    """Return how much of a text can go out: up to the end of a line, and not within a secret."""
    target = _break(text, len(text) - HELD)
    for span in reversed(spans):
        if span.anchor < target < span.end:
            target = span.anchor
    return max(target, 0)


def _break(text: bytes, target: int) -> int:
    """Return the last end of a line before a place, else of a word, else the place itself."""
    line = text.rfind(b"\n", 0, target) + 1
    if line > target // 2:
        return line
    word = max(text.rfind(bytes([mark]), target // 2, target) + 1 for mark in _BREAKS)
    return word or target
