"""Secrets: the names that mean one, their values in a text, and their removal."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# --- Names that mean a secret (``HF_TOKEN``, ``db_password``, ``X-Api-Key``), and names that do not

# Machine learning is full of tokens and keys that are not secret: ``pad_token``, ``num_tokens``,
# ``missing_keys``. So a name is split into words, and the words decide. This is the only definition
# of such names: the variables withheld from ranks, the arguments that are masked and the texts that
# are redacted all use it.

_HINT = re.compile(
    "tok|pas|secret|cred|key|auth|cookie|jwt|pwd|pw|session|bearer|webhook|otp|pat|wort|docker|sess",
    re.I,
)
"""A name without any of these means no secret; most variables have none."""
_WORD = re.compile(rb"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEUTRAL_ENDINGS = _word_set("""
    value values val str string text raw env var b64 base64 encoded header headers data plain
    plaintext field input arg option param default new old current tmp temp my the your
""")
"""Words at the end of a name that change nothing."""
_DESCRIPTIVE_ENDINGS = _word_set("""
    path paths file files filename dir directory folder name names type types count counts len
    length size limit index indices position positions url uri endpoint method methods expiry
    expires expiration expired ttl age at sock socket provider class format scope scopes status
    error errors policy required enabled disabled stdin prompt helper manager mode level usage
    embedding embeddings mask dim ratio rate loss accuracy acc s sec second seconds ms parallelism
    module plugin backend info alg algorithm bytes id ids fingerprint failed failure invalid
    ok valid missing exists version timeout cache store handler callback reader writer
    dropout padding weight weights bias shape norm proj projection states layer layers head heads
""")
"""Words at the end of a name that describe a secret without being one: ``token_count``."""
_ALWAYS = {
    "password": _word_set(
        "password passwords passwd passphrase passphrases passwort kennwort passe pwd pw"
    ),
    "secret": _word_set("secret secrets otp totp webhook clientsecret"),
    "credential": _word_set("credential credentials cred creds dockerconfigjson"),
    "api-key": _word_set("apikey apikeys"),
    "private-key": _word_set("privatekey privkey secretkey sshkey"),
    "token": _word_set(
        "jwt apitoken authtoken accesstoken refreshtoken bearertoken idtoken hftoken"
    ),
    "key": _word_set("accesskey authkey accountkey signingkey masterkey sharedkey"),
    "cookie": _word_set("cookie cookies"),
    "authorization": _word_set("authorization auth authn oauth xauth bearer"),
    "session-key": _word_set("sessionkey sessionid phpsessid jsessionid"),
}
"""Words that mean a secret wherever they end a name, by the kind of secret."""
_KIND_OF_WORD = {word: kind for kind, words in _ALWAYS.items() for word in words}
_SECRET_KEY_PREFIXES = _word_set("""
    api private secret access session signing sign encryption encrypt decryption ssh auth account
    master deploy deployment storage license licence wandb service shared rsa dsa ecdsa ed25519 pgp
    gpg hmac aes crypt client admin root subscription openai anthropic hf huggingface hub comet
    neptune mlflow aws azure gcp google github gitlab jwt cookie tls
    ssl pem munge write ingest app application fernet cipher vault consumer server user cluster
    registry clearml
""")
"""Words before ``key`` that make it a secret one."""
_SECRET_TOKEN_PREFIXES = _word_set("""
    api auth access refresh bearer session secret private personal hf hub huggingface github gh
    gitlab git id csrf xsrf jwt oauth oauth2 security service user bot slack wandb pypi npm deploy
    ci job registry admin root login client device push upload account openai vault jupyter notebook
    telegram discord x cluster runner agent server web app azure aws gcp google munge slurm sas my
    anthropic cohere replicate comet neptune read write hugging face
""")
"""Words before ``token`` that make it surely a secret."""
_TEXT_TOKEN_PREFIXES = _word_set("""
    pad padding eos bos unk mask sep cls special image video audio vision num max min n per next
    last first prev previous start end stop begin total generated input output prompt target source
    context decoder encoder forced bad unexpected sub word text char byte unknown additional extra
    added each every single new one two mean avg average cost tokens batch padded masked
    ignore separator class placeholder patch time implicit
""")
"""Words before ``token`` that make it a piece of a text: ``pad_token``."""
_PASSWORD_PREFIXES = _word_set("""
    db user smtp imap mysql pg postgres redis ftp http https proxy login admin root ssh sudo ldap
    rabbitmq mongo mongodb mail email database sql svc service account registry git
""")
"""Words before ``pass`` that make it surely a password."""
_PASSAGE_PREFIXES = _word_set("""
    forward backward single one two three first second third multi full last next data train eval
    num n each per test high low band by all optimizer gradient pre post validation epoch step
""")
"""Words before ``pass`` that make it a pass over data: ``forward_pass``."""
_SHORT_PASSWORD_WORDS = _word_set("pwd pw passe otp")
_GLUED_ENDINGS = sorted(
    (_ALWAYS["password"] | _ALWAYS["secret"] | _ALWAYS["api-key"]) - _SHORT_PASSWORD_WORDS
)
"""Endings of a compound word that mean a secret whatever stands before: ``PGPASSWORD``."""
_WORDS_ENDING_IN_PASS = _word_set("""
    bypass compass encompass surpass overpass underpass trespass askpass subpass midpass allpass
    renderpass singlepass
""")
"""Words that end in ``pass`` and have nothing to do with a password."""
SPLIT = _word_set("key keys token tokens pass")
"""Endings of a compound word that begins with one of the prefixes above: ``githubtoken``."""
_KIND_IN_QUERY = {
    "awsaccesskeyid": "key",
    "code": "code",
    "key": "key",
    "pass": "password",
    "pw": "password",
    "sas": "signature",
    "sig": "signature",
    "signature": "signature",
    "x-amz-credential": "credential",
    "x-amz-security-token": "token",
    "x-amz-signature": "signature",
    "x-goog-credential": "credential",
    "x-goog-signature": "signature",
}
"""Names that mean a secret in the query of a URL, and nothing elsewhere."""
_BARE_NAMES = _word_set("key pass session")
"""Names that are too common in texts, but mean a secret as a variable or an option."""
_INFIXES = ("password", "passwd", "passphrase", "apikey", "credential")
"""Parts that mean a secret anywhere in the name of a variable or an option."""
_HARMLESS_VARIABLES = frozenset(("PWD", "OLDPWD", "XDG_SESSION_ID"))
"""Variables of every shell and session, which hold no secret."""
_KINDS_ANYWHERE = ("password", "secret", "credential", "api-key", "private-key")
"""Kinds of which a word at any place of a name is enough."""
_KIND_OF_KEY = {"api": "api-key", "private": "private-key", "session": "session-key"}
"""Kinds of keys by the word before ``key``; any other is a ``key``."""
_COMPOUND_PREFIXES = {
    "key": _SECRET_KEY_PREFIXES | _PASSWORD_PREFIXES,
    "keys": _SECRET_KEY_PREFIXES | _PASSWORD_PREFIXES,
    "pass": _SECRET_KEY_PREFIXES | _PASSWORD_PREFIXES,
    "token": _SECRET_TOKEN_PREFIXES,
    "tokens": _SECRET_TOKEN_PREFIXES,
}
"""First parts of a compound word, by its ending."""
_SECRET_PAIRS = {"token": _SECRET_TOKEN_PREFIXES, "key": _SECRET_KEY_PREFIXES}
"""Kinds that a word means anywhere, by that word, where one of these stands before it."""


@dataclass(frozen=True)
class Meaning:
    """The kind of secret that a name stands for."""

    kind: str
    """The kind: ``password``, ``token``, ``api-key``."""
    sure: bool = True
    """False where the value must decide: ``token`` alone may be anything."""


def is_secret(name: str) -> bool:
    """Return True if a variable or an option of this name holds a secret.

    A name is all there is to go by, so names that may mean anything in a text (``KEY``, ``PASS``,
    ``TOKEN_2``) count here.
    """
    if name in _HARMLESS_VARIABLES or not _HINT.search(name):
        return False
    raw = name.encode(errors="replace")
    if meaning(raw) is not None or name.lower() in _BARE_NAMES:
        return True
    words = _words(raw)
    if not words or words[0] == "no" or words[-1] in _DESCRIPTIVE_ENDINGS:
        return False
    return words[0] == "auth" or "token" in words[:-1] or _has_infix(name)


def _has_infix(name: str) -> bool:
    letters = name.lower().replace("_", "").replace("-", "")
    return any(infix in letters for infix in _INFIXES)


@functools.lru_cache(maxsize=4096)
def meaning(name: bytes, *, query: bool = False) -> Meaning | None:
    """Return the meaning of a name in a text; None if it means no secret."""
    if query:
        kind = _KIND_IN_QUERY.get(name.decode("ascii", "replace").lower())
        if kind:
            return Meaning(kind)
    words = _words(name)
    if not words or words[0] == "no":
        return None
    if name == b"KEY":  # in lower case it is a part of most tables and lists
        return Meaning("key", sure=False)
    words[-1:] = _split_compound(words[-1])
    *before, last = words
    rule = _RULES.get(last)
    if rule is not None:
        return rule(before)
    if last in _DESCRIPTIVE_ENDINGS:
        return None
    kind = _kind_of_ending(last) or _kind_of_inner_words(words)
    return Meaning(kind) if kind else None


def _words(name: bytes) -> list[str]:
    words = [word.decode().lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1] in _NEUTRAL_ENDINGS or words[-1].isdigit()):
        words.pop()
    return words


def _split_compound(word: str) -> list[str]:
    """Split ``githubtoken`` and ``mypass`` into two words; leave any other word alone."""
    for ending in SPLIT:
        prefix = word.removesuffix(ending)
        if prefix != word and prefix in _COMPOUND_PREFIXES[ending]:
            return [prefix, ending]
    prefix = word.removesuffix("pass")
    if prefix in ("", word) or word in _WORDS_ENDING_IN_PASS or prefix in _PASSAGE_PREFIXES:
        return [word]
    return [prefix, "pass"]


def _kind_of_ending(word: str) -> str:
    for ending in _GLUED_ENDINGS:
        if word.endswith(ending):
            return _KIND_OF_WORD[ending]
    return _KIND_OF_WORD.get(word, "")


def _kind_of_inner_words(words: Sequence[str]) -> str:
    """Return the kind that one or two words before the end mean; empty for none."""
    for word in words[:-1]:
        kind = _KIND_OF_WORD.get(word, "")
        if kind in _KINDS_ANYWHERE:
            return kind
    pairs = list(zip(words, words[1:]))  # noqa: RUF007 - pairwise came with Python 3.10
    if any(first + second in _KIND_OF_WORD for first, second in pairs):
        return "secret"
    # ``GITHUB_TOKEN_PROD``, ``API_KEY_PROD``; the pair at the end has been judged already.
    for kind, prefixes in _SECRET_PAIRS.items():
        if any(second == kind and first in prefixes for first, second in pairs[:-1]):
            return kind
    return ""


def _meaning_of_id(before: Sequence[str]) -> Meaning | None:
    if not before:
        return None
    kind = {"session": "session-key", "key": "key"}.get(before[-1])
    return Meaning(kind) if kind else None


def _meaning_of_pwd(before: Sequence[str]) -> Meaning | None:
    """Judge ``pwd`` or ``pw``; alone, it is often the working directory."""
    if list(before) == ["old"]:
        return None
    return Meaning("password", sure=bool(before))


def _meaning_of_key(before: Sequence[str]) -> Meaning | None:
    previous = before[-1] if before else ""
    if previous not in _SECRET_KEY_PREFIXES and not _has_secret_word(before):
        return None
    return Meaning(_KIND_OF_KEY.get(previous, "key"))


def _meaning_of_pass(before: Sequence[str]) -> Meaning | None:
    if not before or before[-1] in _PASSAGE_PREFIXES:
        return None
    sure = before[-1] in _PASSWORD_PREFIXES or _has_secret_word(before)
    return Meaning("password", sure=sure)


def _meaning_of_token(before: Sequence[str]) -> Meaning | None:
    surely = _meaning_of_tokens(before)
    if surely is not None:
        return surely
    previous = before[-1] if before else ""
    if previous in _TEXT_TOKEN_PREFIXES or previous.isdigit():
        return None
    return Meaning("token", sure=False)


def _meaning_of_tokens(before: Sequence[str]) -> Meaning | None:
    """Judge ``tokens`` or ``pat``, which mean a secret only after a hint."""
    previous = before[-1] if before else ""
    if previous in _SECRET_TOKEN_PREFIXES or _has_secret_word(before):
        return Meaning("token")
    return None


def _has_secret_word(words: Sequence[str]) -> bool:
    return any(word in _KIND_OF_WORD for word in words)


_RULES: dict[str, Callable[[Sequence[str]], Meaning | None]] = {
    "id": _meaning_of_id,
    "ids": _meaning_of_id,
    "key": _meaning_of_key,
    "keys": _meaning_of_key,
    "pass": _meaning_of_pass,
    "pat": _meaning_of_tokens,
    "pw": _meaning_of_pwd,
    "pwd": _meaning_of_pwd,
    "token": _meaning_of_token,
    "tokens": _meaning_of_tokens,
}
"""Last words that may mean anything: the words before them decide."""


# --- The values of secret names in a text: after an equals sign, a colon or an option ------------

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
_DASHES = re.compile(r"(?:^|[\s\"'])--?$")
_BLANK = re.compile(r"\s")
_OPENING = ("[", "{", "(")


def secret_values(text: str) -> Iterator[tuple[int, int]]:
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
    """Find the quote closing name and value, -1 for none; not one around the name (JSON)."""
    last_opened = bisect.bisect(quotes, (match.start(), 0)) - 1
    closing_quote = quotes[last_opened][1] if last_opened >= 0 else -1
    return closing_quote if closing_quote > match.end("name") else -1


def _quotes(text: str) -> Iterator[tuple[int, int]]:
    """Yield pairs of shell quotes; the end of the text closes one, too."""
    for match in _QUOTE.finditer(text):
        quote = match[0][0]
        if quote == "\\":
            continue
        closed = len(match[0]) > 1 and match[0][-1] == quote
        yield match.start(), match.end() - closed


def _value_range(
    match: re.Match[str], closing_quote: int, word: re.Pattern[str]
) -> tuple[int, int]:
    """Return the value's range, empty for none; ``closing_quote`` -1: no quotes around both."""
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
    return match.string[max(0, match.start() - 3) : match.start()]


def _between_quotes(quoted: re.Match[str]) -> tuple[int, int]:
    quote = quoted["open"]
    closed = quoted[0].endswith(quote) and len(quoted[0]) > len(quote)
    return quoted.start() + len(quote), quoted.end() - closed * len(quote)


def _end_of_list(text: str, start: int, limit: int) -> int:
    """Return the end of the list or table at ``start``; 0 if it ends before ``limit``."""
    depth = 0
    for match in _BRACKET.finditer(text, start, limit):
        if match["open"]:
            continue
        depth += 1 if match[0] in _OPENING else -1
        if depth == 0:
            return match.end()
    return 0


def _end_of_quotes(text: str, closing_quote: int) -> int:
    """Return where a quoted value ends: at its quote, or after what is attached to that."""
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


def end_of_shell_word(text: str, start: int) -> int:
    """Return where a word of a shell command ends."""
    return _end_of(_SHELL_WORD, text, start)


# --- Removal of secrets from what is kept or shown: variables, arguments, URLs -------------------

# Whatever one side writes to a log, a job file, an event or a message goes through here.
# :mod:`bundle.redaction.secrets` defines which names mean a secret.

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
