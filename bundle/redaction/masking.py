"""Taking secrets out of what is kept or shown: the variables of a program, arguments, URLs.

Whatever one side writes to a log, a job file, an event or a message goes through here; which names
mean a secret is said in :mod:`bundle.redaction.secret_names`.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from .secret_names import is_secret

HIDDEN = "***"
"""What stands in the place of a secret."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s\"'<>`]*)", re.I)
_HOST = re.compile(r"(?:[\w.-]*|\[[0-9a-f:.]*\])(?::[0-9]{0,5})?", re.I)
_PAIR = re.compile(r"([^=&;]*=)[^&;]*")
_QUOTE = re.compile(r"\\.|\"(?:\\.|[^\"\\])*\"?|'[^']*'?", re.S)
"""A part of a shell's line that is in quotes, and to be passed over where it is not."""
_QUOTED = r"(?P<open>\\*[\"'])(?:(?!(?<!\\)(?P=open)).)*(?:(?P=open)|$)"
_VALUE = re.compile(_QUOTED, re.S)
_NEXT = r"(?![A-Za-z_][\w.-]*=)"
"""What follows a comma within a value: no name of another one."""
_WORD = re.compile(rf"(?:{_QUOTED}|\\.|,{_NEXT}|[^\s,;&|\"'\\])*", re.S)
"""A word of a shell's line, whatever is in quotes in it."""
_REST = re.compile(rf"(?:[,;&]{_NEXT}|[^,;&])*", re.S)
_LINE = re.compile(r"[^\n]*")
_ITEM = re.compile(r"[^,}\]\n]*")
_NAME = re.compile(
    r"(?<!\w)(?<!\w[.-])(?P<name>\w[\w.-]*)(?P<sign>[:+?]?="
    r"|\s{1,9}(?:=>|[:+?]?=(?!=))\s{0,9}"
    r"|(?P<own>\\*[\"'])\s*:\s*"
    r"|\s*:(?:\s+|(?=\\*[\"']))"
    r"|:(?!//)(?=\S)"
    r"|\s+(?!--[a-z])(?=\S))"
)
_BRACKET = re.compile(rf"{_QUOTED}|[\[\]{{}}()]", re.S)
"""A bracket of a list or a table, or a text in quotes, whose brackets are none."""
_LISTED = 512
"""Characters of a list that are looked through for its end, where a bracket may begin a word."""
_HEADER = re.compile(r"authorization|cookie|\w+(?:-\w+)+", re.I)
"""Names of headers that are known as such without a blank after the colon."""
_REGISTRY = r"(?:docker|podman|nerdctl|buildah|skopeo|apptainer|singularity|oras|helm)"
_DASHES = re.compile(r"(?:^|[\s\"'])--?$")
_BLANK = re.compile(r"\s")
_LOGIN = re.compile(
    rf"\b(?:{_REGISTRY}\b[^\n;|&]{{0,200}}?\slogin|sshpass)\b[^\n;|&]{{0,200}}?\s-p[\s=]*"
    r"|(?<!\S)(?:-u|-U|--user|--proxy-user)(?:\s+|=)"
)
_USER = re.compile(r"(-u|-U|--user|--proxy-user)(=?)(.*)", re.S)
_NUMBERS = re.compile(r"\d*:\d*")
"""A user and a group, as programs that run containers take them."""
_BARE = re.compile(
    r"(?<![\w./:@+-])[\w.+-]+:[^\s:@/\"'<>]+@(?!sha\d)(?=(?:[\w-]+\.)+[\w-]|localhost\b|[\w.-]+[:#/])"
)
"""A user and a password before a registry that has no scheme."""
_WHOLE = re.compile(r"([-+~]*)([A-Za-z_][\w.-]*)=.*", re.S)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_ANOTHER = re.compile(r"--[a-z][\w-]*(=.*)?", re.S)
_TOKENS = re.compile(r"(--?tokens)(?:=(.*))?", re.S | re.I)
"""An option that may mean tokens of a text, or many that are secret: its value has a say."""
_TOKEN = re.compile(r"(?!\d[\d_.]*(?:e\d+)?[a-z]?\Z)(?=[^\d]*\d)(?=[^a-z]*[a-z])[\w+=-]{6,}", re.I)
"""Letters and digits as no number has them, and no path or name of a file."""


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
    begins = _password_options(argv)
    for at, word in enumerate(argv):
        after = argv[at + 1 : at + 2]
        if at > begins and word.startswith("-p") and word != "-p":
            shown[at] = f"-p{HIDDEN}"
        elif after and (_hides_next(word, after[0]) or (word == "-p" and at > begins)):
            shown[at + 1] = HIDDEN
    return shown


def _password_options(argv: Sequence[str]) -> int:
    """Return after which argument ``-p`` takes a password: that of ``docker login``; else the last.

    The arguments before it decide; it may be any one of some thousands.
    """
    login = registry = False
    for at, word in enumerate(argv):
        program = word.rpartition("/")[2]
        login = login or word == "login"
        registry = registry or re.fullmatch(_REGISTRY, program) is not None
        if program == "sshpass" or (login and registry):
            return at
    return len(argv)


def _hides_next(word: str, after: str) -> bool:
    """Tell whether the argument after an option is a secret."""
    option = _OPTION.fullmatch(word)
    if option is None or _ANOTHER.fullmatch(after):
        return False
    if _TOKENS.fullmatch(word):
        return _TOKEN.fullmatch(after) is not None
    return is_secret(option[1]) or bool(_USER.fullmatch(word) and _is_login(after))


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
    tokens = _TOKENS.fullmatch(word)
    if tokens and _TOKEN.fullmatch(tokens[2] or ""):
        return f"{tokens[1]}={HIDDEN}"
    user = _USER.fullmatch(word)
    if user and _is_login(user[3]):  # ``--user=user:...``, which has no other end
        return f"{user[1]}{user[2]}{HIDDEN}"
    word = _hide_values(_BARE.sub(f"{HIDDEN}@", without_url_secrets(word)))
    return _hide_logins(word) if " " in word or word.startswith("-") else word


def _hide_values(text: str) -> str:
    """Hide what is given to a secret's name anywhere: ``--export=ALL,HF_TOKEN=...``."""
    parts, done = [], 0
    quotes = list(_quotes(text))
    blank = _BLANK.search(text)
    for found in _NAME.finditer(text):
        if found.start() < done or not is_secret(found["name"]):
            continue
        # The quotes that the name is in, unless they are its own: ``{"api_key": "..."}``.
        last = bisect.bisect(quotes, (found.start(), 0)) - 1
        close = quotes[last][1] if last >= 0 else -1
        # An argument without a blank before it is no shell's line, and its value may have some.
        alone = blank is None or blank.start() > found.start()
        start, end = _value(text, found, close if found.end("name") < close else -1, alone)
        if end > start:
            parts += [text[done:start], HIDDEN]
            done = end
    return "".join([*parts, text[done:]])


def _quotes(text: str) -> Iterator[tuple[int, int]]:
    """Where a shell's quotes open and close, or the text ends in them."""
    for found in _QUOTE.finditer(text):
        mark, closed = found[0][0], len(found[0]) > 1 and found[0][-1] == found[0][0]
        if mark != "\\":
            yield found.start(), found.end() - closed


def _value(text: str, found: re.Match[str], close: int, alone: bool) -> tuple[int, int]:
    """Where the value of a name is, which is in quotes that close there; empty for no value."""
    sign, at, before = found["sign"], found.end(), text[max(0, found.start() - 3) : found.start()]
    prose = sign.isspace() and not _DASHES.search(before)
    quoted = None if prose else _VALUE.match(text, at)
    if prose or (sign == ":" and not quoted and not _is_header(found["name"], before)):
        return at, at
    if sign.isspace():
        end = _end(_WORD, text, at)
        return at, end if quoted or close < 0 else min(end, close)
    colon = ":" in sign and "=" not in sign
    if quoted:
        return _inside(quoted) if colon else (at, _end(_WORD, text, at))
    if (found["own"] or not colon) and (end := _end_of_list(text, at, in_json=bool(found["own"]))):
        return at, end
    if close >= 0:
        return at, _end_of_quotes(text, close)
    pattern = _REST if alone else _WORD
    if colon:
        pattern = _ITEM if found["own"] else _LINE
    return at, _end(pattern, text, at)


def _inside(quoted: re.Match[str]) -> tuple[int, int]:
    mark = quoted["open"]
    closed = quoted[0].endswith(mark) and len(quoted[0]) > len(mark)
    return quoted.start() + len(mark), quoted.end() - closed * len(mark)


def _end_of_list(text: str, at: int, *, in_json: bool) -> int:
    """Return where a list or a table ends that begins there; 0 where there is none.

    In JSON nothing else begins with a bracket, so one that has no end goes on to that of the text.
    """
    if text[at : at + 1] not in tuple("[{("):
        return 0
    depth = 0
    for found in _BRACKET.finditer(text, at, len(text) if in_json else at + _LISTED):
        if not found["open"]:
            depth += 1 if found[0] in "[{(" else -1
        if depth == 0:
            return found.end()
    return len(text) if in_json else 0


def _end_of_quotes(text: str, close: int) -> int:
    """Where a value ends that is in quotes: there, or where what is glued to them ends."""
    if text[close + 1 : close + 2] in ("", ",", ":", "]", "}", ")"):
        return close
    end = _end(_WORD, text, close + 1)
    return end - 1 if text[end - 1] == text[close] else end


def _is_header(name: str, before: str) -> bool:
    """Tell whether a name and a colon without a blank begin a header, and are no tag."""
    return bool(_HEADER.fullmatch(name)) and before[-1:] in ("", " ", "\t", "=", "'", '"')


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _hide_logins(text: str) -> str:
    """Hide passwords that no name tells of: ``docker login -p ...``, ``curl -u user:...``."""
    parts, done = [], 0
    for found in _LOGIN.finditer(text):
        end = _end(_WORD, text, found.end())
        value = text[found.end() : end].strip("\"'")
        if found.start() >= done and (found[0].lstrip()[0] != "-" or _is_login(value)):
            parts += [text[done : found.end()], HIDDEN]
            done = end
    return "".join([*parts, text[done:]])


def _is_login(value: str) -> bool:
    return ":" in value and not _NUMBERS.fullmatch(value)
