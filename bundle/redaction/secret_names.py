"""Which names mean a secret (``HF_TOKEN``, ``db_password``, ``X-Api-Key``), and which do not."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..regex import compile_lazily

# Machine learning is full of tokens and keys that are not secret: ``pad_token``, ``missing_keys``.
# So a name is split into words, and the words decide.

HINT = compile_lazily(
    "tok|pas|secret|cred|key|auth|cookie|jwt|pwd|pw|session|bearer|webhook|otp|pat|wort|docker|sess",
    re.I,
)
"""A name without any of these means no secret; most variables have none."""
_WORD = compile_lazily(rb"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


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
SPLIT = _word_set("key keys token tokens pass")  # second words of names: ``API key``
_SIGNATURES = ("sas", "sig", "signature", "x-amz-signature", "x-goog-signature")
_IN_QUERY = {
    **dict.fromkeys(_SIGNATURES, "signature"),
    **dict.fromkeys(("x-amz-credential", "x-goog-credential"), "credential"),
    **dict.fromkeys(("pass", "pw"), "password"),
    **dict.fromkeys(("awsaccesskeyid", "key"), "key"),
    **{"code": "code", "x-amz-security-token": "token"},
}
"""Names that mean a secret in the query of a URL, and nothing elsewhere."""
_BARE_NAMES = _word_set("key pass session")  # a secret as a variable or an option only
_INFIXES = compile_lazily("password|passwd|passphrase|apikey|credential")
"""Parts that mean a secret anywhere in the name of a variable or an option."""
_HARMLESS_VARIABLES = frozenset(("PWD", "OLDPWD", "XDG_SESSION_ID"))  # of every shell and session
_KINDS_ANYWHERE = ("password", "secret", "credential", "api-key", "private-key")
"""Kinds of which a word at any place of a name is enough."""
_PAIRED_KINDS = {
    "apikey": "api-key",
    "privatekey": "private-key",
    "sessionkey": "session-key",
    "sessionid": "session-key",
}
"""Kinds by the last two words; any other is that of the last one."""


class Meaning(NamedTuple):
    """The kind of secret that a name stands for."""

    kind: str  # the kind: ``password``, ``token``, ``api-key``
    sure: bool = True  # false where the value must decide: ``token`` alone may be anything


def remove_secret_variables(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return the variables of a program without secrets, except those that ``passed`` names."""
    return {name: value for name, value in env.items() if name in passed or not is_secret(name)}


def is_secret(name: str) -> bool:
    """Return True if a variable or an option of this name holds a secret, as ``KEY`` may."""
    if name in _HARMLESS_VARIABLES or not HINT.search(name):
        return False
    raw = name.encode(errors="replace")
    if judge_secret_name(raw) is not None or name.lower() in _BARE_NAMES:
        return True
    words = _words(raw)
    if not words or words[0] == "no" or words[-1] in _DESCRIPTIVE_ENDINGS:
        return False
    has_infix = _INFIXES.search(re.sub("[_-]", "", name.lower())) is not None
    return words[0] == "auth" or "token" in words[:-1] or has_infix


class _Rule(NamedTuple):
    """A last word that may mean anything: the word before it decides."""

    kind: str
    sure: frozenset[str]  # words before it that make it surely a secret
    prefixes: frozenset[str] = frozenset()  # words before it in one compound word: ``githubtoken``
    unsure: bool = False  # true if the value decides after any other word but these
    harmless: frozenset[str] = frozenset()


_KEY = _Rule("key", _SECRET_KEY_PREFIXES, _SECRET_KEY_PREFIXES | _PASSWORD_PREFIXES)
_TOKENS = _Rule("token", _SECRET_TOKEN_PREFIXES, _SECRET_TOKEN_PREFIXES)
_ID = _Rule("key", _word_set("session key"))
_PWD = _Rule("password", frozenset(), unsure=True, harmless=frozenset({"old"}))
_PASS = _Rule("password", _PASSWORD_PREFIXES, _KEY.prefixes, True, _PASSAGE_PREFIXES | {""})
_RULES = {
    **dict.fromkeys(("id", "ids"), _ID),
    **dict.fromkeys(("key", "keys"), _KEY),
    "pat": _TOKENS._replace(prefixes=frozenset()),
    **dict.fromkeys(("pw", "pwd"), _PWD),
    "tokens": _TOKENS,
    "token": _TOKENS._replace(unsure=True, harmless=_TEXT_TOKEN_PREFIXES),
    "pass": _PASS,
}


@functools.lru_cache(maxsize=4096)
def judge_secret_name(name: bytes, *, query: bool = False) -> Meaning | None:
    """Return the meaning of a name in a text; None if it means no secret."""
    kind = _IN_QUERY.get(name.decode("ascii", "replace").lower(), "") if query else ""
    if kind:
        return Meaning(kind)
    words = _words(name)
    if not words or words[0] == "no":
        return None
    if name == b"KEY":  # in lower case it is a part of most tables and lists
        return Meaning("key", sure=False)
    words[-1:] = _split_compound(words[-1])
    *before, last = words
    if last in _RULES:
        return _judge_ending(_RULES[last], last, before)
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
    for ending, rule in _RULES.items():
        prefix = word.removesuffix(ending)
        if prefix in rule.prefixes and prefix != word:
            return [prefix, ending]
    prefix = word.removesuffix("pass")
    if prefix in ("", word) or word in _WORDS_ENDING_IN_PASS or prefix in _PASSAGE_PREFIXES:
        return [word]
    return [prefix, "pass"]


def _judge_ending(rule: _Rule, last: str, before: Sequence[str]) -> Meaning | None:
    previous = ("", *before)[-1]
    has_secret_word = rule is not _ID and not _KIND_OF_WORD.keys().isdisjoint(before)
    if rule is _PWD and before not in ([], ["old"]):  # alone, it is often the working directory
        return Meaning(rule.kind)
    if previous in rule.sure or has_secret_word:
        return Meaning(_PAIRED_KINDS.get(previous + last.rstrip("s"), rule.kind))
    is_number = previous.isdigit() and rule.kind == "token"
    if not rule.unsure or previous in rule.harmless or is_number:
        return None
    return Meaning(rule.kind, sure=False)


def _kind_of_ending(word: str) -> str:
    glued = (ending for ending in _GLUED_ENDINGS if word.endswith(ending))
    return _KIND_OF_WORD.get(next(glued, word), "")


def _kind_of_inner_words(words: Sequence[str]) -> str:
    for word in words[:-1]:
        kind = _KIND_OF_WORD.get(word, "")
        if kind in _KINDS_ANYWHERE:
            return kind
    pairs = list(zip(words, words[1:]))  # noqa: RUF007 - pairwise came with Python 3.10
    if any(first + second in _KIND_OF_WORD for first, second in pairs):
        return "secret"
    # ``GITHUB_TOKEN_PROD``, ``API_KEY_PROD``; the pair at the end has been judged already.
    for rule in (_TOKENS, _KEY):
        if any(second == rule.kind and first in rule.sure for first, second in pairs[:-1]):
            return rule.kind
    return ""
