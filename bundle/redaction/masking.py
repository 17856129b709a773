"""Removal of secrets from what is kept or shown: variables, arguments, URLs.

Whatever one side writes to a log, a job file, an event or a message goes through here.
:mod:`bundle.redaction.secret_names` defines which names mean a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from .secret_names import is_secret
from .secret_values import end_of_shell_word, secret_values

HIDDEN = "***"
"""The replacement of a secret."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s\"'<>`]*)", re.I)
_HOST = re.compile(r"(?:[\w.-]*|\[[0-9a-f:.]*\])(?::[0-9]{0,5})?", re.I)
_PAIR = re.compile(r"([^=&;]*=)[^&;]*")
_REGISTRY = r"(?:docker|podman|nerdctl|buildah|skopeo|apptainer|singularity|oras|helm)"
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
    """Return the index after which ``-p`` is a password; one pass, for thousands of arguments."""
    login = registry = False
    for index, word in enumerate(argv):
        program = word.rpartition("/")[2]
        login = login or word == "login"
        registry = registry or re.fullmatch(_REGISTRY, program) is not None
        if program == "sshpass" or (login and registry):
            return index
    return len(argv)


def _hides_next(word: str, following: str) -> bool:
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
    return _hidden(text, secret_values(text))


def _hidden(text: str, ranges: Iterable[tuple[int, int]]) -> str:
    """Hide ranges, which are in order and do not overlap."""
    parts = []
    copied = 0
    for start, end in ranges:
        parts += [text[copied:start], HIDDEN]
        copied = end
    return "".join([*parts, text[copied:]])


def _hide_logins(text: str) -> str:
    """Hide passwords without a name: ``docker login -p ...``, ``curl -u user:...``."""
    return _hidden(text, _passwords(text))


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    hidden = 0
    for match in _LOGIN.finditer(text):
        if match.start() < hidden:
            continue
        end = end_of_shell_word(text, match.end())
        is_user_option = match[0].lstrip().startswith("-")
        if not is_user_option or _is_login(text[match.end() : end].strip("\"'")):
            yield match.end(), end
            hidden = end


def _is_login(value: str) -> bool:
    return ":" in value and not _NUMERIC_IDS.fullmatch(value)
