"""Taking secrets out of what is kept or shown: the variables of a program, arguments, URLs.

Whatever one side writes to a log, a job file, an event or a message goes through here; which names
mean a secret is said in :mod:`bundle.secret`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from .secret import is_secret

HIDDEN = "***"
"""What stands in the place of a secret."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s\"'<>`]*)", re.I)
_HOST = re.compile(r"(?:[\w.-]*|\[[0-9a-f:.]*\])(?::[0-9]{0,5})?", re.I)
_PAIR = re.compile(r"([^=&;]*=)[^&;]*")
_NAME = re.compile(r"([A-Za-z_][\w.-]*)=")
_VALUE = re.compile(r"[^\s,;&]*")
_MEMBER = re.compile(r"([A-Za-z_][\w.-]*)([\"']?\s*:(?:\s+[\"']?|[\"']))[^\"'\n]+")
_GIVEN = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(?!--[a-z])\S+")
_WHOLE = re.compile(r"([-+~]*)([A-Za-z_][\w.-]*)=.*", re.S)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_ANOTHER = re.compile(r"--[a-z][\w-]*(=.*)?", re.S)


def without_secrets(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return the variables of a program without secrets, but for those that are named.

    What is left out reaches no rank, and so no file, log or list of processes on a node.
    """
    return {name: value for name, value in env.items() if name in passed or not is_secret(name)}


def masked(argv: Sequence[str]) -> list[str]:
    """Return arguments as they may be shown: what is given to a secret's name is left out.

    An option hides the argument after it, unless that is an option itself.
    """
    shown = [_masked_word(word) for word in argv]
    for at, word in enumerate(argv[:-1]):
        option = _OPTION.fullmatch(word)
        if option and is_secret(option[1]) and not _ANOTHER.fullmatch(argv[at + 1]):
            shown[at + 1] = HIDDEN
    return shown


def without_url_secrets(text: str) -> str:
    """Return a text with the users, passwords and query values of all its URLs taken out.

    Tokens of downloads stand in queries under any name, so no value of a query stays.
    """
    return _URL.sub(_shown_url, text) if "://" in text else text


def _shown_url(found: re.Match[str]) -> str:
    scheme, rest = found.groups()
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    if "@" in authority:
        rest = authority.rpartition("@")[2] + tail
    elif "@" in tail and not _HOST.fullmatch(authority):  # a password with a slash in it
        rest = tail.rpartition("@")[2]
    rest, hash_sign, fragment = rest.partition("#")
    place, mark, query = rest.partition("?")
    if "=" in query:
        query = _PAIR.sub(rf"\1{HIDDEN}", query)
    elif query:
        query = HIDDEN
    return f"{scheme}{place}{mark}{query}{hash_sign}{_hide_values(fragment)}"


def _masked_word(word: str) -> str:
    whole = _WHOLE.fullmatch(word)
    if whole and is_secret(whole[2]):
        return f"{whole[1]}{whole[2]}={HIDDEN}"
    word = without_url_secrets(word)
    word = _hide_values(word)
    word = _MEMBER.sub(_hide_member, word)
    return _GIVEN.sub(_hide_given, word) if " " in word else word


def _hide_values(text: str) -> str:
    """Hide what is given to a secret's name anywhere: ``--export=ALL,HF_TOKEN=...``."""
    parts, done = [], 0
    for found in _NAME.finditer(text):
        if found.start() < done or not is_secret(found[1]):
            continue
        value = _VALUE.match(text, found.end())
        parts += [text[done : found.end()], HIDDEN]
        done = value.end() if value else found.end()
    return "".join([*parts, text[done:]])


def _hide_member(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if is_secret(found[1]) else found[0]


def _hide_given(found: re.Match[str]) -> str:
    hidden = is_secret(found[1].lstrip("-"))
    return f"{found[1]}{found[2]}{HIDDEN}" if hidden else found[0]
