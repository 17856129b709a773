"""Removal of secrets from what is kept or shown: variables, arguments, URLs.

Whatever one side writes to a log, a job file, an event or a message goes through here.
:mod:`bundle.redaction.secret_names` defines which names mean a secret.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from .secret_names import is_secret

HIDDEN = "***"
"""The replacement of a secret."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s\"'<>`]*)", re.I)
_HOST = re.compile(r"(?:[\w.-]*|\[[0-9a-f:.]*\])(?::[0-9]{0,5})?", re.I)
_PAIR = re.compile(r"([^=&;]*=)[^&;]*")
_QUOTE = re.compile(r"\\.|\"(?:\\.|[^\"\\])*\"?|'[^']*'?", re.S)
"""A quoted part of a shell command, or an escaped character outside quotes."""
_QUOTED = r"(?P<open>\\*[\"'])(?:(?!(?<!\\)(?P=open)).)*(?:(?P=open)|$)"
_VALUE = re.compile(_QUOTED, re.S)
_NOT_A_NAME = r"(?![A-Za-z_][\w.-]*=)"
"""The rest of a value after a comma: no ``NAME=`` begins there."""
_SHELL_WORD = re.compile(rf"(?:{_QUOTED}|\\.|,{_NOT_A_NAME}|[^\s,;&|\"'\\])*", re.S)
"""One word of a shell command, with everything quoted in it."""
_ARGUMENT_VALUE = re.compile(rf"(?:[,;&]{_NOT_A_NAME}|[^,;&])*", re.S)
_TEXT_LINE = re.compile(r"[^\n]*")
_JSON_ITEM = re.compile(r"[^,}\]\n]*")
_NAME_AND_SIGN = re.compile(
    r"(?<!\w)(?<!\w[.-])(?P<name>\w[\w.-]*)(?P<sign>[:+?]?="
    r"|\s{1,9}(?:=>|[:+?]?=(?!=))\s{0,9}"
    r"|(?P<own_quote>\\*[\"'])\s*:\s*"
    r"|\s*:(?:\s+|(?=\\*[\"']))"
    r"|:(?!//)(?=\S)"
    r"|\s+(?!--[a-z])(?=\S))"
)
_BRACKET = re.compile(rf"{_QUOTED}|[\[\]{{}}()]", re.S)
"""A bracket of a list or a table, or a quoted text, whose brackets do not count."""
_LIST_REACH = 512
"""Characters searched for the end of a list, where a bracket may also begin a word."""
_HEADER = re.compile(r"authorization|cookie|\w+(?:-\w+)+", re.I)
"""Header names, recognised even without a blank after the colon."""
_REGISTRY = r"(?:docker|podman|nerdctl|buildah|skopeo|apptainer|singularity|oras|helm)"
_DASHES = re.compile(r"(?:^|[\s\"'])--?$")
_BLANK = re.compile(r"\s")
_LOGIN = re.compile(
    rf"\b(?:{_REGISTRY}\b[^\n;|&]{{0,200}}?\slogin|sshpass)\b[^\n;|&]{{0,200}}?\s-p[\s=]*"
    r"|(?<!\S)(?:-u|-U|--user|--proxy-user)(?:\s+|=)"
)
_USER_OPTION = re.compile(r"(-u|-U|--user|--proxy-user)(=?)(.*)", re.S)
_NUMERIC_IDS = re.compile(r"\d*:\d*")
"""A numeric user and group, as container programs take them."""
_REGISTRY_LOGIN = re.compile(
    r"(?<![\w./:@+-])[\w.+-]+:[^\s:@/\"'<>]+@(?!sha\d)(?=(?:[\w-]+\.)+[\w-]|localhost\b|[\w.-]+[:#/])"
)
"""A user and a password before a registry without a scheme."""
_ASSIGNMENT = re.compile(r"([-+~]*)([A-Za-z_][\w.-]*)=.*", re.S)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_LONG_OPTION = re.compile(r"--[a-z][\w-]*(=.*)?", re.S)
_TOKENS_OPTION = re.compile(r"(--?tokens)(?:=(.*))?", re.S | re.I)
"""An option that may mean tokens of a text or secret ones: its value decides."""
_TOKEN_VALUE = re.compile(
    r"(?!\d[\d_.]*(?:e\d+)?[a-z]?\Z)(?=[^\d]*\d)(?=[^a-z]*[a-z])[\w+=-]{6,}", re.I
)
"""Letters and digits mixed as in a secret token, not a number, a path or a file name."""
_OPENING = ("[", "{", "(")


def without_secrets(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return the variables of a program without secrets, except those that ``passed`` names.

    What is left out reaches no rank, and so no file, log or list of processes on a node.
    """
    return {name: value for name, value in env.items() if name in passed or not is_secret(name)}


def masked(argv: Sequence[str]) -> list[str]:
    """Return arguments as they may be shown, with the values of secret names hidden.

    An option hides the argument after it, unless that is an option itself.
    """
    shown = [_masked_word(word) for word in argv]
    login = _login_index(argv)
    for index, word in enumerate(argv):
        takes_password = index > login and word.startswith("-p")
        if takes_password and word != "-p":
            shown[index] = f"-p{HIDDEN}"
            continue
        if index + 1 == len(argv):
            break
        if takes_password or _hides_next(word, argv[index + 1]):
            shown[index + 1] = HIDDEN
    return shown


def _login_index(argv: Sequence[str]) -> int:
    """Return the index after which ``-p`` takes a password, as in ``docker login -p``.

    The length of the arguments where there is no such command. It is one pass, as there may be
    thousands of arguments.
    """
    login = registry = False
    for index, word in enumerate(argv):
        program = word.rpartition("/")[2]
        login = login or word == "login"
        registry = registry or re.fullmatch(_REGISTRY, program) is not None
        if program == "sshpass" or (login and registry):
            return index
    return len(argv)


def _hides_next(word: str, following: str) -> bool:
    """Return True if the argument after an option is a secret."""
    option = _OPTION.fullmatch(word)
    if option is None or _LONG_OPTION.fullmatch(following):
        return False
    if _TOKENS_OPTION.fullmatch(word):
        return _TOKEN_VALUE.fullmatch(following) is not None
    if is_secret(option[1]):
        return True
    return _USER_OPTION.fullmatch(word) is not None and _is_login(following)


def without_url_secrets(text: str) -> str:
    """Return a text with the users, passwords and query values of all its URLs removed.

    Tokens of downloads stand in queries under any name, so no value of a query stays.
    """
    return _URL.sub(_shown_url, text) if "://" in text else text


def _shown_url(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    rest = _without_user(rest)
    rest, hash_sign, fragment = rest.partition("#")
    location, mark, query = rest.partition("?")
    if "=" in query:
        query = _PAIR.sub(rf"\1{HIDDEN}", query)
    elif query:
        query = HIDDEN
    return f"{scheme}{location}{mark}{query}{hash_sign}{_hide_values(fragment)}"


def _without_user(rest: str) -> str:
    """Return what follows the scheme of a URL without a user and a password."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    if "@" in authority:
        return authority.rpartition("@")[2] + tail
    if "@" in tail and not _HOST.fullmatch(authority):  # a password with a slash in it
        return tail.rpartition("@")[2]
    return rest


def _masked_word(word: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(word)
    if assignment and is_secret(assignment[2]):
        return f"{assignment[1]}{assignment[2]}={HIDDEN}"
    tokens = _TOKENS_OPTION.fullmatch(word)
    if tokens and _TOKEN_VALUE.fullmatch(tokens[2] or ""):
        return f"{tokens[1]}={HIDDEN}"
    user = _USER_OPTION.fullmatch(word)
    if user and _is_login(user[3]):  # ``--user=user:...``, which has no other end
        return f"{user[1]}{user[2]}{HIDDEN}"
    word = _REGISTRY_LOGIN.sub(f"{HIDDEN}@", without_url_secrets(word))
    word = _hide_values(word)
    if " " in word or word.startswith("-"):
        return _hide_logins(word)
    return word


def _hide_values(text: str) -> str:
    """Hide the values of secret names anywhere in a text: ``--export=ALL,HF_TOKEN=...``."""
    return _hidden(text, _values(text))


def _hidden(text: str, ranges: Iterable[tuple[int, int]]) -> str:
    """Return a text with some ranges hidden, which are in order and do not overlap."""
    parts = []
    copied = 0
    for start, end in ranges:
        parts += [text[copied:start], HIDDEN]
        copied = end
    return "".join([*parts, text[copied:]])


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the value of each name of a secret begins and ends."""
    quotes = list(_quotes(text))
    blank = _BLANK.search(text)
    first_blank = blank.start() if blank else len(text)
    hidden = 0
    for match in _NAME_AND_SIGN.finditer(text):
        if match.start() < hidden or not is_secret(match["name"]):
            continue
        # Without a blank before the name it is an argument of its own, whose value may have blanks.
        word = _ARGUMENT_VALUE if first_blank > match.start() else _SHELL_WORD
        start, end = _value_range(match, _closing_quote(match, quotes), word)
        if end > start:
            yield start, end
            hidden = end


def _closing_quote(match: re.Match[str], quotes: Sequence[tuple[int, int]]) -> int:
    """Return the index of the quote that closes around a name and its value; -1 for none.

    Quotes of the name alone do not count, as in ``{"api_key": "..."}``.
    """
    last_opened = bisect.bisect(quotes, (match.start(), 0)) - 1
    closing_quote = quotes[last_opened][1] if last_opened >= 0 else -1
    return closing_quote if closing_quote > match.end("name") else -1


def _quotes(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each pair of a shell's quotes opens and closes; the text's end closes, too."""
    for match in _QUOTE.finditer(text):
        quote = match[0][0]
        if quote == "\\":
            continue
        closed = len(match[0]) > 1 and match[0][-1] == quote
        yield match.start(), match.end() - closed


def _value_range(
    match: re.Match[str], closing_quote: int, word: re.Pattern[str]
) -> tuple[int, int]:
    """Return where the value of a name begins and ends; an empty range for no value.

    Args:
        match: the name and the sign between it and its value: ``=``, ``: ``, a blank.
        closing_quote: the index of the quote that closes around both; -1 for none.
        word: an unquoted value after an equals sign.
    """
    if match["sign"].isspace():
        return _range_after_blank(match, closing_quote)
    if ":" in match["sign"] and "=" not in match["sign"]:
        return _range_after_colon(match, closing_quote)
    return _range_after_equals(match, closing_quote, word)


def _range_after_blank(match: re.Match[str], closing_quote: int) -> tuple[int, int]:
    """Return the range of ``--token VALUE``; none where the name is a word of prose."""
    text, start = match.string, match.end()
    if not _DASHES.search(_before(match)):
        return start, start
    end = _end_of(_SHELL_WORD, text, start)
    if closing_quote >= 0 and not _VALUE.match(text, start):
        end = min(end, closing_quote)
    return start, end


def _range_after_colon(match: re.Match[str], closing_quote: int) -> tuple[int, int]:
    """Return the range of a header's or a table's value."""
    text, start = match.string, match.end()
    quoted = _VALUE.match(text, start)
    if quoted:
        return _between_quotes(quoted)
    if match["sign"] == ":" and not _is_header(match):
        return start, start
    if match["own_quote"] and text.startswith(_OPENING, start):
        return start, _end_of_list(text, start, len(text)) or len(text)
    if closing_quote >= 0:
        return start, _end_of_quotes(text, closing_quote)
    return start, _end_of(_JSON_ITEM if match["own_quote"] else _TEXT_LINE, text, start)


def _range_after_equals(
    match: re.Match[str], closing_quote: int, word: re.Pattern[str]
) -> tuple[int, int]:
    """Return the range of ``NAME=VALUE``."""
    text, start = match.string, match.end()
    if _VALUE.match(text, start):
        return start, _end_of(_SHELL_WORD, text, start)
    if text.startswith(_OPENING, start):
        end = _end_of_list(text, start, start + _LIST_REACH)
        if end:
            return start, end
    if closing_quote >= 0:
        return start, _end_of_quotes(text, closing_quote)
    return start, _end_of(word, text, start)


def _before(match: re.Match[str]) -> str:
    """Return the characters just before a name."""
    return match.string[max(0, match.start() - 3) : match.start()]


def _between_quotes(quoted: re.Match[str]) -> tuple[int, int]:
    quote = quoted["open"]
    closed = quoted[0].endswith(quote) and len(quoted[0]) > len(quote)
    return quoted.start() + len(quote), quoted.end() - closed * len(quote)


def _end_of_list(text: str, start: int, limit: int) -> int:
    """Return where the list or table that begins at ``start`` ends; 0 for not before ``limit``."""
    depth = 0
    for match in _BRACKET.finditer(text, start, limit):
        if match["open"]:
            continue
        depth += 1 if match[0] in _OPENING else -1
        if depth == 0:
            return match.end()
    return 0


def _end_of_quotes(text: str, closing_quote: int) -> int:
    """Return where a quoted value ends: at its quote, or where what is glued to that ends."""
    if text[closing_quote + 1 : closing_quote + 2] in ("", ",", ":", "]", "}", ")"):
        return closing_quote
    end = _end_of(_SHELL_WORD, text, closing_quote + 1)
    return end - 1 if text[end - 1] == text[closing_quote] else end


def _is_header(match: re.Match[str]) -> bool:
    """Return True if a name and a colon without a blank are a header's, not an image's tag."""
    if not _HEADER.fullmatch(match["name"]):
        return False
    return _before(match)[-1:] in ("", " ", "\t", "=", "'", '"')


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def _hide_logins(text: str) -> str:
    """Hide passwords without a name: ``docker login -p ...``, ``curl -u user:...``."""
    return _hidden(text, _passwords(text))


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each password that follows an option of a command begins and ends."""
    hidden = 0
    for match in _LOGIN.finditer(text):
        if match.start() < hidden:
            continue
        end = _end_of(_SHELL_WORD, text, match.end())
        is_user_option = match[0].lstrip().startswith("-")
        if not is_user_option or _is_login(text[match.end() : end].strip("\"'")):
            yield match.end(), end
            hidden = end


def _is_login(value: str) -> bool:
    """Return True for ``user:password``."""
    return ":" in value and not _NUMERIC_IDS.fullmatch(value)
