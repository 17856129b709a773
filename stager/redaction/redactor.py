"""Removal of secrets and names from a stream of bytes."""

from __future__ import annotations

import bisect
import html
import ipaddress
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bundle.redaction.known_values import KnownValues
from bundle.redaction.secrets import (
    Span,
    change_bytes,
    find_match_end,
    find_named_values,
    find_passwords,
    find_url_logins,
    looks_random,
    merge_spans,
)
from bundle.regex import compile_lazily

from .secret_shapes import find_shapes

# --- A text as it reads once colours, zero bytes and escapes are gone; places map back to the text

_LEVELS = 6  # times that a text may be escaped: JSON within JSON within a shell's quotes
_ATOM = compile_lazily(
    rb"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[()][A-Z0-9])"
    rb"|\0|\xef\xbb\xbf|\xff\xfe|\xe2\x80[\x8b-\x8d]|\xc2[\xad\xa0]|[^\n]\x08"
    rb"|\\u00[0-7][0-9A-Fa-f]|\\u2028|\\x[0-7][0-9A-Fa-f]|\\[\"'\\/nrtb`]|\\[01][0-7]{2}"
    rb"|\\\r?\n[ \t]{0,80}|=\r?\n"
    rb"|%[0-7][0-9A-Fa-f]"
    rb"|&(?:quot|apos|amp|lt|gt|#(?:[0-9]{2,3}|x[0-9A-Fa-f]{2}));"
)
_ESCAPED_LETTERS = {b"t": b"\t", b"b": b"\b", b"n": b"\n", b"r": b"\r"}
_ASCII = 0x80
_MARKS = (
    *(b"\\", b"%", b"\x1b", b"\0", b"&", b"\x08", b"=\n", b"=\r\n"),
    *(b"\xe2\x80", b"\xc2\xad", b"\xc2\xa0"),
)
"""A text with none of these reads as it stands."""


class View(NamedTuple):
    """A text, read at one level; ``under`` is the level that it was made from."""

    text: bytes
    under: View | None = None
    pieces: Sequence[tuple[int, int, int]] = ()  # their starts here and below, their lengths below

    def map_back(self, start: int, end: int) -> tuple[int, int]:
        """Return a place here as one in the text itself."""
        if self.under is None:
            return start, end
        first, _ = self._map_byte(start)
        last = self._map_byte(end - 1)[1] if end > start else first
        return self.under.map_back(first, last)

    def _map_byte(self, at: int) -> tuple[int, int]:
        number = max(0, bisect.bisect_right(self.pieces, (at, sys.maxsize)) - 1)
        here, below, length = self.pieces[number]
        is_last = number + 1 == len(self.pieces)
        if is_last or self.pieces[number + 1][0] - here == length:  # unchanged
            return below + at - here, below + at - here + 1
        return below, below + length


def read_views(text: bytes) -> list[View]:
    """Return a text itself and, where that differs, what it reads as without any escapes."""
    views = [View(text)]
    while len(views) <= _LEVELS and (view := _read(views[-1])) is not None:
        views.append(view)
    return views[:1] + views[1:][-1:]


def _read(under: View) -> View | None:
    text = under.text
    if not any(mark in text for mark in _MARKS):
        return None
    parts: list[bytes] = []
    pieces: list[tuple[int, int, int]] = []
    done = length = 0

    def add(part: bytes, start: int, end: int) -> None:
        nonlocal done, length
        if part:
            pieces.append((length, start, end - start))
            parts.append(part)
            length += len(part)
        done = end

    for match in _ATOM.finditer(text):
        add(text[done : match.start()], done, match.start())
        add(_read_atom(text, match), *match.span())
    if not done:
        return None
    pieces.append((length, done, len(text) - done))
    return View(b"".join([*parts, text[done:]]), under, pieces)


def _read_atom(text: bytes, match: re.Match[bytes]) -> bytes:
    """Return what an escape stands for; nothing for a colour, or what is struck out."""
    atom, start = match[0], match.start()
    if atom == b"\0":  # half of a wide letter, or the end of a variable or an argument
        around = text[max(0, start - 2) : max(0, start - 1)], text[start + 2 : start + 3]
        return b"" if b"\0" in around else b"\n"
    first = atom[1:2]
    is_text = atom.startswith((b"\\", b"&", b"%")) and not atom.endswith(b"\b")
    if not is_text or first in b"\r\n":
        return b" " if atom == b"\xc2\xa0" else b""
    if atom.startswith(b"&"):
        return html.unescape(atom.decode("ascii")).encode()
    if atom.startswith(b"%"):
        return bytes([int(atom[1:], 16)])
    return _read_escape(first, atom[1:])


def _read_escape(first: bytes, body: bytes) -> bytes:
    if not (first in b"ux" or first.isdigit()):
        return _ESCAPED_LETTERS.get(first, first)
    code = int(body, 8) if first.isdigit() else int(body[1:], 16)
    return bytes([code]) if code < _ASCII else b"\n"


# --- Pseudonyms for people and machines: the same one for the same name, everywhere --------------

_HOME = compile_lazily(
    rb"(?<![\w.])/(?:home|Users|export/home|data/home|u)/([A-Za-z_][\w.-]{0,63})"
)
_MAIL = compile_lazily(
    rb"(?<![\w.+-])(?!git@)[A-Za-z0-9_][\w.+-]{0,63}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
)
_IP4 = compile_lazily(rb"(?<![\w.+-])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w-]|\.[0-9])")
_IP6 = compile_lazily(
    rb"(?<![\w:.])(?=[0-9a-fA-F:]{7,39}(?![\w:]))[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}"
)
_VERSION = compile_lazily(
    rb"(?:[=<>~!]=|\b(?:version|release|nvidia|cuda|cudnn|cu[0-9]{2}|driver)[\w-]{0,40})"
    rb"[\"']?[ \t]{0,40}[:=(,]{0,2}[ \t]{0,9}[\"']?\Z|\bv\Z",
    re.I,
)
"""Before a number of four parts that is a version and no address."""
_URL_HOST = compile_lazily(rb"://(?:[^\s/@\"'<>]{0,200}@)?([A-Za-z0-9][A-Za-z0-9.-]{1,120})")
_DOMAIN = (
    rb"(?:(?:\.[A-Za-z][A-Za-z0-9-]{0,62}){0,5}"
    rb"\.(?:com|org|net|edu|gov|mil|int|local|localdomain|internal|cluster|lan|intra|corp|home"
    rb"|[a-z]{2})\b(?!\.\w))?"
)
_EDGE = rb"(?![A-Za-z0-9])"
_RANGE = rb"[0-9]{0,6}\[[0-9,-]{1,2000}\]"  # at the end of a list of hosts: ``hpc[07-09,12]``
_PUBLIC = (
    b"pytorch.org", b"huggingface.co", b"github.com",
    b"githubusercontent.com", b"python.org", b"nvidia.com", b"anaconda.org", b"readthedocs.io",
    b"localhost", b"example.org", b"example.com", b"wandb.ai", b"schedmd.com",
)  # fmt: skip
_NOBODY = frozenset(
    b"root user users admin home shared data public nobody lost+found all local test ubuntu "
    b"runner node login none slurm work main".split()
)
_FORMS = {"user": b"USER-%d", "email": b"person-%d@example.org"}
_MIN_NAME = 3  # letters of a user's name that is hidden


class Pseudonyms:
    """Replaces names of users, hosts and addresses by numbers, in the order they are met."""

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self.learned = 0  # the number of users met that were not known at first
        self._given: dict[tuple[str, bytes], bytes] = {}
        self._users = [user.encode() for user in users if _is_name(user.encode())]
        bare = dict.fromkeys(host.partition(".")[0].encode() for host in hosts)
        self._hosts = [host for host in bare if host not in (b"", b"localhost")]
        for kind, names in (("user", self._users), ("node", self._hosts)):
            for name in names:
                self._pseudonym(kind, name)
        stems = {host.rstrip(b"0123456789") for host in self._hosts} - {*self._hosts, b""}
        self._host_patterns = [
            *_compile_names("node", self._hosts, _EDGE + _DOMAIN),
            *_compile_names("node", stems, _RANGE),
        ]
        self._user_patterns = _compile_names("user", self._users, _EDGE)

    def find(self, text: bytes) -> Iterator[Span]:
        """Find all names in a text, each with its pseudonym."""
        for kind, start, end in self._find_names(text):
            name = text[start:end] if kind == "user" else text[start:end].lower()
            if kind == "node":
                name = text[start:end].partition(b".")[0]
            yield Span(start, end, kind, start, pseudonym=self._pseudonym(kind, name))

    def met(self) -> list[str]:
        """Return all names of users that are known by now."""
        return [user.decode() for user in self._users]

    def _find_names(self, text: bytes) -> Iterator[tuple[str, int, int]]:
        for home in _HOME.finditer(text):
            self._meet(home[1])
            if home[1] in self._users:
                yield "user", *home.span(1)
        mail = [("email", _MAIL)] if b"@" in text else []
        for kind, pattern in (*self._user_patterns, *self._host_patterns, *mail):
            yield from ((kind, *match.span()) for match in pattern.finditer(text))
        yield from self._find_url_hosts(text)
        yield from _find_addresses(text)

    def _find_url_hosts(self, text: bytes) -> Iterator[tuple[str, int, int]]:
        for match in _URL_HOST.finditer(text) if b"://" in text else ():
            host = match[1].rstrip(b".").lower()
            known = host.endswith(_PUBLIC) or host.partition(b".")[0] in self._hosts
            if not known and not _IP4.fullmatch(host):
                yield "host", match.start(1), match.start(1) + len(host)

    def _meet(self, user: bytes) -> None:
        """Learn a name from a home directory: it is hidden from then on, wherever it stands."""
        if user not in self._users and _is_name(user):
            self._users.append(user)
            self._user_patterns = _compile_names("user", self._users, _EDGE)  # hosts stay
            self.learned += 1

    def _pseudonym(self, kind: str, name: bytes) -> bytes:
        if b"[" in name:
            return b"node-[...]"
        key = kind, name
        if key not in self._given:
            number = 1 + sum(given == kind for given, _ in self._given)
            form = _FORMS.get(kind, kind.encode() + b"-%d")
            self._given[key] = b"USER" if (kind, number) == ("user", 1) else form % number
        return self._given[key]


def _find_addresses(text: bytes) -> Iterator[tuple[str, int, int]]:
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


def _compile_names(
    kind: str, names: Iterable[bytes], behind: bytes
) -> list[tuple[str, re.Pattern[bytes]]]:
    any_of = b"|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
    pattern = re.compile(rb"(?<![A-Za-z0-9])(?:" + any_of + rb")" + behind)
    return [(kind, pattern)] if any_of else []


def _is_address(text: bytes) -> bool:
    try:
        address = ipaddress.ip_address(text.decode())
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or text.startswith(b"255."))


# --- Removal of secrets from a stream of bytes: lines keep their numbers, memory stays flat ------

# The last part of a text is looked at again with what follows, so that no secret is cut in two.

BLOCK = 1 << 18  # bytes that go out at a time
HELD = 1 << 16  # bytes that are looked at again with the next; no secret of a few lines is longer
LONGEST = 1 << 22  # bytes kept at most; the rest of a longer secret is taken out as it comes
_MAX_LEARNED_BYTES = 400  # bytes of a value that is learned: a longer one is not repeated by chance
_MAX_LEARNED = 500  # values that are learned from texts at most
_WIDTHS = frozenset((79, 80, 88, 99, 100, 119, 120, 132, 159, 160, 199, 200))
"""Characters of a line at which programs begin a new one, whatever it says."""
_WIDEST = 1000
_REST = compile_lazily(rb"(?:\r?\n[A-Za-z0-9+/_.=-]{1,200}){1,2}")
_WORD_BYTES = bytes(set(range(256)) - set(b" \t\r\n\"'"))


class Redactor:
    """Takes secrets out of texts, and counts them."""

    def __init__(
        self, known: KnownValues | None = None, pseudonyms: Pseudonyms | None = None
    ) -> None:
        self.known = known or KnownValues()  # looked for everywhere; it learns
        self.counts: Counter[str] = Counter()  # the number of secrets of each kind taken out
        self.learned = 0  # the number of values it has learned: what went out may have them
        self._pseudonyms = pseudonyms

    def words(self, text: str) -> str:
        """Return a string without its secrets."""
        return change_bytes(text, self.text)

    def text(self, data: bytes) -> bytes:
        """Return a whole text without its secrets."""
        return b"".join(self.redact_stream([data]))

    def redact_stream(
        self, pieces: Iterable[bytes], start: int = 0, end: int = sys.maxsize
    ) -> Iterator[bytes]:
        """Yield a text without its secrets; what is before ``start`` or behind ``end`` stays."""
        window, base, wanted = b"", 0, BLOCK + HELD
        in_secret = False
        blocks = (part[at : at + BLOCK] for part in pieces for at in range(0, len(part), BLOCK))
        for block in blocks:
            window += block
            if in_secret:
                rest = window.lstrip(_WORD_BYTES)
                base += len(window) - len(rest)
                window, in_secret = rest, not rest
            if len(window) < wanted:
                continue
            spans = self._find(window)
            length = _find_cut(window, spans)
            in_secret = not length and len(window) >= LONGEST
            if in_secret:
                length = len(window)
            if not length:
                wanted = 2 * len(window)
                continue
            yield self._replace(window[:length], spans, start - base, end - base)
            window, base, wanted = window[length:], base + length, BLOCK + HELD
        yield self._replace(window, self._find(window), start - base, end - base)

    def find_secrets(self, text: bytes) -> Iterator[tuple[Span, bytes]]:
        """Yield what must not stay in a text, each with its value where that may be elsewhere."""
        for view in read_views(text):
            for span in self._find_in_view(view.text):
                has_name = span.anchor != span.start
                value = view.text[span.start : span.end] if has_name else b""
                if span.kind == "url-credential":
                    value = value.partition(b":")[2]
                yield _map_back(text, view, span), value

    def _find(self, text: bytes) -> list[Span]:
        """Find secrets, and again if values were learned: they may be anywhere in the text."""
        found = list(self.find_secrets(text))
        before = self.learned
        for span, value in found:
            is_url = span.kind == "url-credential"
            is_short = len(value) <= _MAX_LEARNED_BYTES and self.learned < _MAX_LEARNED
            if is_short and (is_url or looks_random(value)):
                self.learned += self.known.add(value)
        if self.learned > before:
            found = list(self.find_secrets(text))
        return merge_spans(span for span, _ in found)

    def _find_in_view(self, text: bytes) -> Iterator[Span]:
        yield from find_named_values(text)
        yield from find_shapes(text)
        yield from find_passwords(text)
        yield from find_url_logins(text)
        yield from self.known.find(text)
        if self._pseudonyms is not None:
            yield from self._pseudonyms.find(text)

    def _replace(self, text: bytes, spans: Sequence[Span], start: int, end: int) -> bytes:
        """Return a part of a text, redacted; line ends within a secret stay."""
        at = max(0, start)
        stop = max(0, min(len(text), end))
        out: list[bytes] = []
        for span in spans:
            if span.end <= at or span.start >= stop:
                continue
            newlines = text.count(b"\n", max(at, span.start), min(span.end, stop))
            word = span.pseudonym or b"[redacted: %s]" % span.kind.encode()
            out += [text[at : span.start], span.quote, word, span.quote, b"\n" * newlines]
            self.counts[span.kind] += 1
            at = span.end
        return b"".join([*out, text[at:stop]])


def _map_back(text: bytes, view: View, span: Span) -> Span:
    start, end = view.map_back(span.start, span.end)
    anchor, _ = view.map_back(span.anchor, span.anchor + 1)
    if not span.pseudonym and text[end : end + 1] in (b"\n", b"\r"):
        # Its line may have ended to fit a width, and the secret goes on.
        width = end - text.rfind(b"\n", max(0, end - _WIDEST), end) - 1
        end = find_match_end(_REST, text, end) if width in _WIDTHS else end
    return span._replace(start=start, end=end, anchor=min(start, anchor))


def _find_cut(text: bytes, spans: Sequence[Span]) -> int:
    """Return how much of a text can go out: up to the end of a line, and not within a secret."""
    target = len(text) - HELD
    line = text.rfind(b"\n", 0, target) + 1
    if line <= target // 2:  # of a long line up to the end of a word
        line = max(text.rfind(mark, target // 2, target) + 1 for mark in (b" ", b"\t", b",", b";"))
    target = line or target
    for span in reversed(spans):
        if span.anchor < target < span.end:
            target = span.anchor
    return max(target, 0)
