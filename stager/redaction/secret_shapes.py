"""Secrets by their form: assignments, tokens, URLs, commands."""

from __future__ import annotations

import base64
import binascii
import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bundle.redaction.secrets import meaning

from .secret_values import (
    OPEN,
    QUOTES,
    Name,
    Span,
    Value,
    checked,
    end_of,
    is_digest,
    is_placeholder,
    looks_random,
    value_at,
)

# --- The value of a name: in shell, JSON, TOML, Python, headers, URLs, tables, commands ----------

_TYPES = rb"(?:str|bytes|Any|Secret\w*|(?:Optional|Union)\[[\w, |]{1,40}\]|str \| None)"
_OP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?[\])]{0,2}[ \t]{0,40}(?::[ \t]?" + _TYPES + rb"[ \t]?(?==))?"
    rb"(?P<op>=>|->|:=|={1,3}|:(?!//)|\xef\xbc\x9a|\xe2\x94\x82|\xe2\x94\x83|\||\t)"
    rb"[ \t]{0,80}"
)
_GAP = re.compile(
    rb"(?P<close>" + QUOTES + rb")?"
    rb"(?:(?P<comma>[ \t]{0,8},)(?:[ \t\0]|\\?\r?\n){0,120}|(?:[ \t\0]|\\?\r?\n){1,120})"
)
"""Between an option and its value, in a command or in a list of arguments."""
_PAIR = re.compile(rb"[ \t]{0,8},\s{0,80}[bBuU]?(?=[\"'])")
"""Between a quoted name and its value in a tuple or a list."""
_OTHER = rb"\s{0,80},\s{0,80}\"(?!value)\w{1,30}\"[ ]?:[ ]?\"[^\"\n]{0,80}\""
_BESIDE = re.compile(
    rb"(?:" + _OTHER + rb"){0,2}\s{0,80},?\s{0,80}(?:" + QUOTES + rb")?(?:value|val|content)"
    rb"(?:" + QUOTES + rb")?[ \t]{0,8}[:=][ \t]{0,8}",
    re.I,
)
"""``"name": "HF_TOKEN", "value": ...``, as in descriptions of containers."""
_AHEAD = re.compile(
    rb"[\"']value[\"'] ?: ?(?P<quote>[\"'])(?P<value>[^\"'\n]{1,4096})[\"']\s{0,80},\s{0,80}"
    rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z"
)
"""The same the other way round."""
_AHEAD_BYTES = 4200
_NAME_KEY = re.compile(rb"[\"'](?:name|key)[\"'] ?: ?[\"']\Z")
_ELEMENT = re.compile(rb"[^<>\n]{0,200}>\s{0,80}(?P<data><!\[CDATA\[)?")
_ELEMENT_BYTES = 4096
_SMALL_WORDS = re.compile(
    rb"(?:[ \t\"'`(\[,:=>]|(?:is|was|are|of|value|set|to|as|with|using|used|for|named)\b){1,24}"
)
"""Between a name and a value in a sentence."""
_OTHER_WORDS = re.compile(rb"(?: [\w.@'-]{1,20}){1,3} ?[:=]{1,2} ?[\"'`]?")
"""The same with words that say more: ``API key provided: ...``."""
_STRESS = re.compile(rb"\b(?:is|was)\b|[\"'`\t:=]|  ")
"""A sign that a word of letters and digits is a value, and not the next word."""
_BAR = rb"(?:(?:\xe2\x94[\x82\x83]|\|)[ \t]{0,200})?"
_NEXT = re.compile(
    rb"[ \t]{0,80}(?:[|>][+-]?)?[ \t]{0,200}" + _BAR + rb"\r?\n"
    rb"(?:\[\w{1,20}\]: ?)?[ \t]{0,200}" + _BAR + rb"(?P<item>- )?"
)
"""From a name at the end of a line to its value on the next one."""
_ITEMS = re.compile(rb"(?:\r?\n[ \t]{0,80}- [^\n]{1,200}){0,100}")
"""Further values of a list that has one on each line."""
_NEXT_LISTED = re.compile(rb"[\"'],\s{0,80}[\"'][ \t]{0,200}")
"""The same in a list of lines."""

_OPTION = re.compile(rb"[\"']?-[-a-zA-Z]")
_METAVAR = re.compile(rb"[A-Z]+(?:_[A-Z]+)*")
_RANDOM = re.compile(rb"[^\s\"'`,;()<>\[\]{}]{6,}")
_SETTER = re.compile(rb"(?:\b(?:setenv|set -g?x|set -Ux|ENV|ARG)|\blogin\s{1,9}\S{1,80})\s{1,9}\Z")
_BLANK = re.compile(rb"\s{1,9}")
_PROSE = frozenset(
    b"to or and for with is in if option flag argument when instead of was not can may the".split()
)
"""Words after an option in a sentence about it."""
_BEFORE = 120
_PLAIN_NAME = re.compile(rb"[A-Z][A-Z0-9_]*|-.*|[a-z_]{1,24}")
_LINE_ENDS = (b"", b"\r", b"\n", b"\0", b"'", b'"')
_LINE_OR_ITEM_ENDS = (b"", b"\n", b",", b"]", b"\xe2", b"|")
_DIGIT = re.compile(rb"[0-9]")
_LETTER = re.compile(rb"[A-Za-z]")
_MIN_MIXED = 6
"""Letters and digits of a word that may be a password."""
_MIN_PASSWORD, _MIN_WITH_DIGIT = 6, 8
"""Bytes of a value on a line of its own."""
_MAX_METAVAR = 8
"""Letters of a word in capitals that stands for the value of an option."""


def value_of(text: bytes, name: Name) -> Value | None:
    """Return the value of a name; None where it has none, or one that is no secret."""
    if text[name.start - 1 : name.start] == b"<" and not name.query:
        return _element(text, name)
    assignment = _OP.match(text, name.end)
    if assignment is not None and not (name.option and assignment["op"] in (b"|", b"\t", b":")):
        return _assigned(text, name, assignment)
    return _argument(text, name) if name.option else _unassigned(text, name)


def _unassigned(text: bytes, name: Name) -> Value | None:
    for find in (_after_setter, _ahead, _paired, _on_line_of_value, _in_sentence):
        value = find(text, name)
        if value is not None:
            return value
    return None


def _after_setter(text: bytes, name: Name) -> Value | None:
    """Return the value after a name that a command sets: ``setenv HF_TOKEN ...``."""
    before = text[max(0, name.start - _BEFORE) : name.start]
    blank = _BLANK.match(text, name.end)
    if blank is None or not _SETTER.search(before):
        return None
    return value_at(text, name, blank.end(), b"=")


def _ahead(text: bytes, name: Name) -> Value | None:
    """Return the value before a name, both with a key: ``"value": "...", "name": "HF_TOKEN"``."""
    if not _NAME_KEY.search(text[max(0, name.start - 12) : name.start]):
        return None
    at = text.rfind(b"value", max(0, name.start - _AHEAD_BYTES), name.start)
    match = _AHEAD.match(text, at - 1, name.start) if at > 0 else None
    if match is None:
        return None
    return checked(text, name, Value(start=match.start("value"), end=match.end("value")))


def _paired(text: bytes, name: Name) -> Value | None:
    """Return the value beside a quoted name: ``("HF_TOKEN", "...")``, or under ``"value"``."""
    closed = OPEN.match(text, name.end)  # the quote that closes the name
    if closed is None:
        return None
    beside = _BESIDE.match(text, closed.end())
    if beside is not None:
        return value_at(text, name, beside.end(), b"=")
    if text.startswith(b">", closed.end()):
        return _element(text, name)
    comma = _PAIR.match(text, closed.end())
    value = value_at(text, name, comma.end(), b"=") if comma else None
    if value is None:
        return None
    raw = text[value.start : value.end]
    if not (name.meaning.sure or looks_random(raw)):
        return None
    # A list of names is no secret.
    return None if _PLAIN_NAME.fullmatch(raw) or meaning(raw) is not None else value


def _on_line_of_value(text: bytes, name: Name) -> Value | None:
    """Return the value under ``value:`` on a line below the name."""
    beside = _BESIDE.match(text, name.end)
    if beside is None or b"\n" not in beside[0]:
        return None
    return value_at(text, name, beside.end(), b"=")


def _assigned(text: bytes, name: Name, assignment: re.Match[bytes]) -> Value | None:
    op, at = assignment["op"], assignment.end()
    if _is_weak(text, name, op):
        return _in_sentence(text, name)
    close = assignment["close"] or b""
    gap = _NEXT.match(text, at)
    if gap is not None:
        value = _on_next_line(text, name, gap.end(), quoted=True)
        return _with_items(text, value) if gap["item"] else value
    listed = None if close else _NEXT_LISTED.match(text, at)
    if listed is not None:
        return _on_next_line(text, name, listed.end(), quoted=False)
    return value_at(text, name, at, op, close)


def _is_weak(text: bytes, name: Name, op: bytes) -> bool:
    """Return whether a sign may stand between any two words, and need not assign anything."""
    if op == b"->":
        return not name.meaning.sure
    return op == b"\t" or (op == b"|" and not _in_table(text, name.start))


def _in_table(text: bytes, start: int) -> bool:
    return text[max(0, start - _BEFORE) : start].rstrip(b" \t").endswith(b"|")


def _with_items(text: bytes, value: Value | None) -> Value | None:
    """Return the first item of a list with the further ones, each on a line of its own."""
    return replace(value, end=end_of(_ITEMS, text, value.end)) if value else None


def _argument(text: bytes, name: Name) -> Value | None:
    """Return the argument after an option, or the next element of a list of arguments."""
    gap = _GAP.match(text, name.end)
    if gap is None or _OPTION.match(text, gap.end()):
        return None
    listed = bool(gap["close"] or gap["comma"])
    if listed and not OPEN.match(text, gap.end()):
        return None
    value = value_at(text, name, gap.end(), b" ")
    if value is None or _is_prose(text[value.start : value.end]):
        return None
    if _is_one_a_line(gap) and not _fills_line(text, value):
        return None
    return value


def _is_one_a_line(gap: re.Match[bytes]) -> bool:
    """Return whether arguments stand below one another, without a comma or a continued line."""
    return b"\n" in gap[0] and not gap["comma"] and b"\\" not in gap[0]


def _is_prose(raw: bytes) -> bool:
    """Return whether a word goes on with a sentence about an option, or stands for its value."""
    if raw in _PROSE:
        return True
    if not _METAVAR.fullmatch(raw):
        return False
    return len(raw) <= _MAX_METAVAR or meaning(raw) is not None


def _fills_line(text: bytes, value: Value) -> bool:
    has_end = text[value.end : value.end + 1] in _LINE_ENDS
    return has_end and b" " not in text[value.start : value.end]


def _element(text: bytes, name: Name) -> Value | None:
    tag = _ELEMENT.match(text, name.end)
    if tag is None:
        return None
    start = tag.end()
    ending = b"]]>" if tag["data"] else b"<"
    end = text.find(ending, start, start + _ELEMENT_BYTES)
    return checked(text, name, Value(start=start, end=end)) if end >= 0 else None


def _on_next_line(text: bytes, name: Name, at: int, *, quoted: bool) -> Value | None:
    """Return a value on the line after its name, if it is the only word there."""
    value = value_at(text, name, at, b"=")
    if value is None or (quoted and text[value.start - 1 : value.start] in (b'"', b"'")):
        return value
    raw, behind = text[value.start : value.end], text[value.end : value.end + 2]
    has_end = behind.strip(b"\"' \t\r")[:1] in _LINE_OR_ITEM_ENDS
    if not has_end or raw.endswith((b":", b",", b".")) or b" " in raw:
        return None
    return value if _is_likely(raw, name) else None


def _is_likely(raw: bytes, name: Name) -> bool:
    if name.meaning.kind == "password" and len(raw) >= _MIN_PASSWORD:
        return True
    if name.meaning.sure and len(raw) >= _MIN_WITH_DIGIT and _DIGIT.search(raw):
        return True
    return looks_random(raw) or is_digest(raw)


def _in_sentence(text: bytes, name: Name) -> Value | None:
    """Return a word that looks random, a few small words after the name: ``the token is ...``."""
    for between in (_OTHER_WORDS, _SMALL_WORDS):
        gap = between.match(text, name.end)
        match = _RANDOM.match(text, gap.end()) if gap else None
        if gap is None or match is None:
            continue
        word = match[0].rstrip(b".,:;")
        if looks_random(word) or (_is_stressed(text, name, gap) and _is_password(word)):
            return Value(start=match.start(), end=match.start() + len(word))
    return None


def _is_stressed(text: bytes, name: Name, gap: re.Match[bytes]) -> bool:
    """Return whether a sentence announces a value: by capitals, ``is``, a quote or a colon."""
    if not name.meaning.sure:
        return False
    return text[name.start : name.end].isupper() or bool(_STRESS.search(gap[0]))


def _is_password(word: bytes) -> bool:
    if len(word) < _MIN_MIXED or not _DIGIT.search(word) or not _LETTER.search(word):
        return False
    return not (word.startswith(b"/") or is_placeholder(word) or is_digest(word))


# --- Secrets that give themselves away by their form, or by the command or the URL they stand in

Check = Callable[[re.Match[bytes]], bool]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of a kind of secret."""

    kind: str
    """The kind of secret."""
    needles: tuple[bytes, ...]
    """One of these is in it; a text with none of them is not looked at further."""
    pattern: re.Pattern[bytes]
    """All of it; where the pattern has groups, the one that matches is the secret."""
    check: Check | None = None
    """A further condition that a regular expression cannot express."""


def _secret(match: re.Match[bytes]) -> bytes:
    return match[match.lastindex or 0]


def _mixed(match: re.Match[bytes]) -> bool:
    """Return whether a secret has letters and digits: a word of a language has no digits."""
    text = _secret(match)
    return bool(re.search(rb"[0-9]", text)) and bool(re.search(rb"[A-Za-z]", text))


def _is_jwt(match: re.Match[bytes]) -> bool:
    return match[0].count(b".") > 1


def _is_bearer(match: re.Match[bytes]) -> bool:
    return looks_random(match[0]) or _mixed(match)


def _is_no_commit(match: re.Match[bytes]) -> bool:
    return b"commit" not in match[0]


def _is_login(match: re.Match[bytes]) -> bool:
    """Return whether base64 holds ``user:password``."""
    digits = _secret(match).rstrip(b"=")
    try:
        decoded = base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except (binascii.Error, ValueError):
        return False
    return b":" in decoded and decoded.isascii() and decoded.decode().isprintable()


def _shape(kind: str, needles: str, pattern: bytes, check: Check | None = None) -> Shape:
    return Shape(
        kind=kind,
        needles=tuple(needles.encode().split()),
        pattern=re.compile(pattern, re.M),
        check=check,
    )


_EDGE = rb"(?<![A-Za-z0-9])"
_KEY_IN_BASE64 = rb"(?:b3BlbnNzaC1rZXk|LS0tLS1CRUdJTi)[A-Za-z0-9+/=_-]{16,}"
_JWT = rb"(?<![\w-])eyJ[\w-]{8,}(?:\.[\w-]*){1,4}"
_GITLAB = rb"gl(?:pat|ptt|dt|rt|cbt|oas|ft|agent|soat)-[A-Za-z0-9_.-]{16,}"
_PREFIXED = (
    rb"(?:dapi|dckr_pat_|r8_|nvapi-|gsk_|SG\.|hv[sb]\.|tskey-|shpat_|wandb_v1_|ntn_|xai-|lin_api_)"
    rb"[\w.-]{20,}"
)
_WANDB = (
    rb"(?:wandb|[Aa][Pp][Ii][ _-]?[Kk]ey|API_KEY|login|authorize)[^\n]{0,120}?"
    rb"(?<![0-9A-Za-z])([0-9a-f]{40})(?![0-9A-Za-z])"
)
_NO_SCHEME = (
    rb"(?<![\w./:@-])([\w.+-]{1,64}:(?![0-9]{1,5}@sha)[^\s:@/\"'<>]{3,80})"
    rb"@(?:tcp\(|[\w-]{1,63}(?:\.[\w-]{1,63}){1,6})"
)
"""``user:password@tcp(host)`` and the like."""
_PGPASS = rb"^[\w.*-]{1,80}:(?:[0-9]{1,5}|\*):[^:\s]{1,80}:[^:\s]{1,80}:([^:\s]{1,200})\r?$"
"""A line of PostgreSQL's file of passwords: host, port, database, user, password."""
_GIVEN = rb"(?!\[redacted)([^\s\"'|]{2,200})"
_READER = rb"(?:-stdin|--with-token|\bsudo[ ]-S|\bkinit|\bpasswd)"
_ECHO = rb"\becho[ \t]{1,9}(?:-n[ \t]{1,9})?[\"']?" + _GIVEN + rb"[\"']?[ \t]{0,9}\|[^\n]{0,160}?"
"""A password that a command reads from another one."""
SHAPES = (
    _shape("hf-token", "hf_ api_org_", rb"(?:hf|api_org)_[A-Za-z0-9]{30,}", _mixed),
    _shape("hf-token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{10,}", _mixed),
    _shape("github-token", "gh", rb"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"),
    _shape("gitlab-token", "gl", _GITLAB),
    _shape("slack-token", "xox xapp-", rb"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}", _mixed),
    _shape("webhook", "/services/ /webhooks/", rb"/(?:services|webhooks)/[\w/-]{20,}", _mixed),
    _shape("api-key", "sk- sk_ rk_ rk-", _EDGE + rb"[sr]k[-_][A-Za-z0-9_-]{20,}", _mixed),
    _shape("aws-key", "AKIA ASIA", rb"A(?:KIA|SIA)[A-Z0-9]{16}"),
    _shape("google-key", "AIza ya29.", rb"AIza[\w-]{35}|ya29\.[\w-]{20,}"),
    _shape("jwt", "eyJ", _JWT, _is_jwt),
    _shape("private-key", "b3BlbnNzaC1rZXk LS0tLS1CRUdJTi", _KEY_IN_BASE64),
    _shape("private-key", "AGE-SECRET-KEY-", rb"AGE-SECRET-KEY-[A-Z0-9]{20,}"),
    _shape("pypi-token", "pypi-", rb"pypi-[A-Za-z0-9_-]{32,}", _mixed),
    _shape("npm-token", "npm_", rb"npm_[A-Za-z0-9]{20,}", _mixed),
    _shape("password-hash", "$", rb"\$(?:1|2[abxy]|5|6|y|argon2\w{1,3})\$[./A-Za-z0-9$=,]{20,}"),
    _shape("munge-credential", "MUNGE:", rb"MUNGE:[A-Za-z0-9+/=]+:?"),
    _shape(
        "token",
        "dapi dckr_pat_ r8_ nvapi- gsk_ SG. hvs. hvb. tskey- shpat_ wandb_v1_ ntn_ xai- lin_api_",
        _EDGE + _PREFIXED,
        _mixed,
    ),
    _shape(
        "authorization",
        "earer EARER",
        rb"(?i:(?<=bearer )|(?<=bearer\t))[A-Za-z0-9._~+/=-]{8,}",
        _is_bearer,
    ),
    _shape(
        "authorization", "asic ASIC", rb"(?i:basic)[ \t]{1,8}([A-Za-z0-9+/_-]{6,}={0,2})", _is_login
    ),
    _shape("wandb-key", "wandb API api Api", _WANDB, _is_no_commit),
    _shape("url-credential", "@", _NO_SCHEME),
    _shape("password", ":", _PGPASS),
    _shape("password", "echo", _ECHO + rb"(?:-stdin|--with-token|sudo[ ]-S|kinit|passwd)"),
    _shape("password", "<<<", _READER + rb"[^\n|]{0,80}?<<<[ ]?[\"']?" + _GIVEN),
)  # fmt: skip
_CURL = rb"\b[^\n]{0,160}?[ \t](?:-u|-U|--user|--proxy-user)[ =\t]{0,9}[\"']?[^\s:\"']{1,80}:"
_LOGIN = rb"[ \t]login\b[^\n]{0,160}?[ \t]-p[ \t]{1,9}"
_PROGRAMS = {
    b"sshpass": rb"[ \t]{1,9}-p[ \t]{0,9}",
    b"docker": rb"[ \t]{0,8}" + _LOGIN,
    b"podman": rb"[ \t]{0,8}" + _LOGIN,
    b"apptainer": rb"[^\n]{0,80}?" + _LOGIN,
    b"singularity": rb"[^\n]{0,80}?" + _LOGIN,
    b"mysql": rb"(?:dump|admin)?\b[^\n]{0,160}?[ \t]-p(?=\S)",
    b"pass:": b"",
    b"ldap": rb"(?:search|whoami|add|modify|passwd)\b[^\n]{0,160}?[ \t]-w[ \t]{0,9}",
    b"smbclient": rb"\b[^\n]{0,160}?[ \t]-U[ \t]{0,9}[^\s%]{1,80}%",
    b"login(": rb"\s{0,40}(?:\w{1,20}[ ]?=[ ]?)?[bf]?(?=[\"'])",
    b"curl": _CURL,
    b"wget": _CURL,
}
"""Commands that take a password as an argument without a name: what stands before it."""
_PROGRAM = {
    program: re.compile(re.escape(program) + before + rb"[\"']?(?!\[redacted)([^\s\"']{2,})")
    for program, before in _PROGRAMS.items()
}
_QUOTED_BYTES = 200
"""Bytes of a password in quotes."""
_STEP = 64
"""Bytes after a command in which no other one of its kind is looked for."""
_AUTHORITY = re.compile(rb"[^\s/?#\"'<>\\]*")
_URL = re.compile(rb"[^\s\"'<>]*")
_PLAIN_URL = re.compile(rb"[A-Za-z0-9._-]*(?::[0-9]{1,5})?")
_URL_BYTES = 2048
_BEGIN = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key"
)
_END = re.compile(rb"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: \w+")
_BODY = re.compile(
    rb"(?:[A-Za-z0-9+/=]{16,}|\\+[nr]|[\s,\"']|\[\w{1,20}\]: |(?:Proc-Type|DEK-Info): [^\n]{1,80})*"
)
_KEY_LINE = re.compile(rb"(?:\[\w{1,20}\]: )?[A-Za-z0-9+/=]{4,}")
_KEY_BYTES = 1 << 16
"""No private key is longer."""


def spans(text: bytes) -> Iterator[Span]:
    """Find all that looks like a secret."""
    for shape in SHAPES:
        if any(needle in text for needle in shape.needles):
            yield from _of_shape(text, shape)
    for program, pattern in _PROGRAM.items():
        yield from _in_commands(text, program, pattern)
    yield from _in_urls(text)
    if b"PRIVATE KEY" in text or b"PuTTY-User-Key" in text:
        yield from _private_keys(text)


def _of_shape(text: bytes, shape: Shape) -> Iterator[Span]:
    for match in shape.pattern.finditer(text):
        if shape.check is None or shape.check(match):
            start, end = match.span(match.lastindex or 0)
            yield Span.at(start, end, shape.kind, match.start())


def _in_commands(text: bytes, program: bytes, pattern: re.Pattern[bytes]) -> Iterator[Span]:
    at = text.find(program)
    while at >= 0:
        match = pattern.match(text, at)
        following = at + _STEP
        if match is not None:
            end = _end_of_quotes(text, at, match.start(1), match.end(1))
            yield Span.at(match.start(1), end, "password", at)
            following = match.end()
        at = text.find(program, following)


def _end_of_quotes(text: bytes, command: int, start: int, end: int) -> int:
    """Return where a password ends: with the quotes that it, or the user before it, began in."""
    before = text[command:start]
    for mark in (b'"', b"'"):
        if before.count(mark) % 2:
            close = text.find(mark, end, end + _QUOTED_BYTES)
            line = text.find(b"\n", end, end + _QUOTED_BYTES)
            if close >= 0 and (line < 0 or close < line):
                return close
    return end


def _in_urls(text: bytes) -> Iterator[Span]:
    at = text.find(b"://")
    while at >= 0:
        start = at + 3
        login = _login(text, start)
        is_secret = b":" in login or looks_random(login)
        if is_secret and not login.startswith(b"[redacted"):
            yield Span(
                start=start,
                end=start + len(login),
                kind="url-credential",
                anchor=at,
                learned=login.partition(b":")[2],
            )
        at = text.find(b"://", start)


def _login(text: bytes, start: int) -> bytes:
    authority = text[start : end_of(_AUTHORITY, text, start)]
    login, sign, _ = authority.rpartition(b"@")
    if not sign and b":" in authority and not _PLAIN_URL.fullmatch(authority):
        # a password with a slash in it
        url = text[start : end_of(_URL, text, start, start + _URL_BYTES)]
        login, _, _ = url.rpartition(b"@")
    return login


def _private_keys(text: bytes) -> Iterator[Span]:
    """Find the keys in PEM; of one that has lost its beginning or its end, what is left of it."""
    ends = list(_END.finditer(text))
    places = [match.end() for match in ends]
    begins = list(_BEGIN.finditer(text))
    next_begins = [match.start() for match in begins[1:]] + [len(text)]
    for begin, next_begin in zip(begins, next_begins, strict=False):
        stop = min(begin.end() + _KEY_BYTES, len(text), next_begin)
        nearest = bisect.bisect_right(places, begin.end())
        if nearest < len(places) and places[nearest] <= stop:
            end = places[nearest]
        else:
            body = text[begin.end() : end_of(_BODY, text, begin.end(), stop)]
            end = begin.end() + len(body.rstrip(b" \t\r\n,\"'\\"))
        yield Span.at(begin.start(), end, "private-key")
    for last in ends:
        first = _first_key_line(text, last.start())
        if first < last.start():
            yield Span.at(first, last.end(), "private-key")


def _first_key_line(text: bytes, end_line: int) -> int:
    first = line = end_line
    while first > 0 and end_line - line < _KEY_BYTES // 4:
        line = text.rfind(b"\n", max(0, first - 160), max(0, first - 1)) + 1
        if not _KEY_LINE.fullmatch(text[line:first].strip()):
            break
        first = line
    return first
