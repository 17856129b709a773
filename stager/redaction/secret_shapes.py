"""Secrets that give themselves away by their form: tokens of known services, private keys."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from bundle.redaction.secrets import Span, find_match_end, looks_random
from bundle.regex import compile_lazily


def _get_secret(match: re.Match[bytes]) -> bytes:
    return match[match.lastindex or 0]


def _is_mixed(match: re.Match[bytes]) -> bool:
    text = _get_secret(match)
    has_both = re.search(rb"[0-9]", text) and re.search(rb"[A-Za-z]", text)
    return bool(has_both) or looks_random(text)


def _is_login(match: re.Match[bytes]) -> bool:
    digits = _get_secret(match).rstrip(b"=")
    try:
        decoded = base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except (binascii.Error, ValueError):
        return False
    return b":" in decoded and decoded.isascii() and decoded.decode().isprintable()


_EDGE = rb"(?<![A-Za-z0-9])"
_JWT = rb"(?<![\w-])eyJ[\w-]{8,}(?:\.[\w-]*){2,4}"
_GITLAB = rb"gl(?:pat|ptt|dt|rt|cbt|oas|ft|agent|soat)-[A-Za-z0-9_.-]{16,}"
_PREFIXES = (
    "dapi dckr_pat_ r8_ nvapi- gsk_ SG. hvs. hvb. tskey- shpat_ wandb_v1_ ntn_ xai- lin_api_"
)
_PREFIX = b"|".join(map(re.escape, _PREFIXES.encode().split()))
_PREFIXED = _EDGE + rb"(?:" + _PREFIX + rb")[\w.-]{20,}"
_WANDB = (
    rb"(?:wandb|[Aa][Pp][Ii][ _-]?[Kk]ey|API_KEY|login|authorize)[^\n]{0,120}?"
    rb"(?<![0-9A-Za-z])([0-9a-f]{40})(?![0-9A-Za-z])"
)
_PGPASS = rb"^[\w.*-]{1,80}:(?:[0-9]{1,5}|\*):[^:\s]{1,80}:[^:\s]{1,80}:([^:\s]{1,200})\r?$"
"""A line of PostgreSQL's file of passwords: host, port, database, user, password."""
_KEY_IN_BASE64 = rb"(?:b3BlbnNzaC1rZXk|LS0tLS1CRUdJTi)[A-Za-z0-9+/=_-]{16,}"
_Check = Callable[[re.Match[bytes]], bool]
_FORMS: tuple[tuple[str, str, bytes, _Check | None], ...] = (
    ("hf-token", "hf_ api_org_", rb"(?:hf|api_org)_[A-Za-z0-9]{30,}", _is_mixed),
    ("hf-token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{10,}", _is_mixed),
    ("github-token", "gh", rb"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}", None),
    ("gitlab-token", "gl", _GITLAB, None),
    ("slack-token", "xox xapp-", rb"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}", _is_mixed),
    ("webhook", "/services/ /webhooks/", rb"/(?:services|webhooks)/[\w/-]{20,}", _is_mixed),
    ("api-key", "sk- sk_ rk_ rk-", _EDGE + rb"[sr]k[-_][A-Za-z0-9_-]{20,}", _is_mixed),
    ("aws-key", "AKIA ASIA", rb"A(?:KIA|SIA)[A-Z0-9]{16}", None),
    ("google-key", "AIza ya29.", rb"AIza[\w-]{35}|ya29\.[\w-]{20,}", None),
    ("jwt", "eyJ", _JWT, None),
    ("private-key", "b3BlbnNzaC1rZXk LS0tLS1CRUdJTi", _KEY_IN_BASE64, None),
    ("private-key", "AGE-SECRET-KEY-", rb"AGE-SECRET-KEY-[A-Z0-9]{20,}", None),
    ("pypi-token", "pypi-", rb"pypi-[A-Za-z0-9_-]{32,}", _is_mixed),
    ("npm-token", "npm_", rb"npm_[A-Za-z0-9]{20,}", _is_mixed),
    ("password-hash", "$", rb"\$(?:1|2[abxy]|5|6|y|argon2\w{1,3})\$[./A-Za-z0-9$=,]{20,}", None),
    ("munge-credential", "MUNGE:", rb"MUNGE:[A-Za-z0-9+/=]+:?", None),
    ("token", _PREFIXES, _PREFIXED, _is_mixed),
    ("authorization", "earer EARER", rb"(?i:(?<=bearer[ \t]))[A-Za-z0-9._~+/=-]{8,}", _is_mixed),
    ("authorization", "asic ASIC", rb"(?i:basic)[ \t]{1,8}([A-Za-z0-9+/_-]{6,}={0,2})", _is_login),
    ("wandb-key", "wandb API api Api", _WANDB, lambda match: b"commit" not in match[0]),
    ("password", ":", _PGPASS, None),
)
"""Kind; words of which a text has one; the form, whose group is the secret; a further condition."""
_COMPILED = [
    (kind, needles.encode().split(), compile_lazily(pattern, re.M), check)
    for kind, needles, pattern, check in _FORMS
]


def find_shapes(text: bytes) -> Iterator[Span]:
    """Yield all that looks like a secret."""
    for kind, needles, pattern, check in _COMPILED:
        if any(needle in text for needle in needles):
            for match in pattern.finditer(text):
                if check is None or check(match):
                    yield Span(*match.span(match.lastindex or 0), kind, match.start())
    if b"PRIVATE KEY" in text or b"PuTTY-User-Key" in text:
        yield from _find_private_keys(text)


_BEGIN = compile_lazily(
    rb"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key"
)
_END = compile_lazily(
    rb"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: \w+"
)
_BODY = compile_lazily(
    rb"(?:[A-Za-z0-9+/=]{16,}|\\+[nr]|[\s,\"']|\[\w{1,20}\]: |(?:Proc-Type|DEK-Info): [^\n]{1,80})*"
)
_LINES_BACKWARDS = compile_lazily(rb"(?:(?: :\]\w{1,20}\[)?[ \t]*\r?\n[ \t\r]*[A-Za-z0-9+/=]{4,})+")
_KEY_BYTES = 1 << 16  # no private key is longer


def _find_private_keys(text: bytes) -> Iterator[Span]:
    """Find the keys in PEM; of one that has lost its beginning or its end, what is left of it."""
    begins = [begin.span() for begin in _BEGIN.finditer(text)]
    for (begin, inner), (following, _) in pairwise([*begins, (len(text), 0)]):
        stop = min(inner + _KEY_BYTES, following)
        last = _END.search(text, inner, stop)
        body = text[inner : find_match_end(_BODY, text, inner, stop)].rstrip(b" \t\r\n,\"'\\")
        yield Span(begin, last.end() if last else inner + len(body), "private-key", begin)
    done = 0
    for last in _END.finditer(text):
        above = text[max(done, last.start() - _KEY_BYTES) : last.start()][::-1]
        start = last.start() - find_match_end(_LINES_BACKWARDS, above)
        done = last.end()
        yield Span(start, done, "private-key", start)
