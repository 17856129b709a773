"""Names that mean a secret (``HF_TOKEN``, ``db_password``, ``X-Api-Key``), and names that do not.

Machine learning is full of tokens and keys that are none: ``pad_token``, ``num_tokens``,
``missing_keys``. So a name is taken apart into words, and the words decide. This is the only
definition of such names: variables that ranks do not get, arguments that are masked and texts that
are redacted all ask here.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_NEEDLE = re.compile(
    "tok|pas|secret|cred|key|auth|cookie|jwt|pwd|pw|session|bearer|webhook|otp|pat|wort|docker|sess",
    re.I,
)
"""Without one of these, which most variables are, a name means no secret."""
_WORD = re.compile(rb"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_IDLE = _set("""
    value values val str string text raw env var b64 base64 encoded header headers data plain
    plaintext field input arg option param default new old current tmp temp my the your
""")
"""Words at the end of a name that change nothing."""
_HARMLESS = _set("""
    path paths file files filename dir directory folder name names type types count counts len
    length size limit index indices position positions url uri endpoint method methods expiry
    expires expiration expired ttl age at sock socket provider class format scope scopes status
    error errors policy required enabled disabled stdin prompt helper manager mode level usage
    embedding embeddings mask dim ratio rate loss accuracy acc s sec second seconds ms parallelism
    module plugin backend info alg algorithm bytes id ids fingerprint failed failure invalid
    ok valid missing exists version timeout cache store handler callback reader writer
    dropout padding weight weights bias shape norm proj projection states layer layers head heads
""")
"""Words at the end of a name that make it tell something about a secret, and not the secret."""
_ALWAYS = {
    "password": _set(
        "password passwords passwd passphrase passphrases passwort kennwort passe pwd pw"
    ),
    "secret": _set("secret secrets otp totp webhook clientsecret"),
    "credential": _set("credential credentials cred creds dockerconfigjson"),
    "api-key": _set("apikey apikeys"),
    "private-key": _set("privatekey privkey secretkey sshkey"),
    "token": _set("jwt apitoken authtoken accesstoken refreshtoken bearertoken idtoken hftoken"),
    "key": _set("accesskey authkey accountkey signingkey masterkey sharedkey"),
    "cookie": _set("cookie cookies"),
    "authorization": _set("authorization auth authn oauth xauth bearer"),
    "session-key": _set("sessionkey sessionid phpsessid jsessionid"),
}
_KIND = {word: kind for kind, words in _ALWAYS.items() for word in words}
_KEYS = _set("""
    api private secret access session signing sign encryption encrypt decryption ssh auth account
    master deploy deployment storage license licence wandb service shared rsa dsa ecdsa ed25519 pgp
    gpg hmac aes crypt client admin root subscription openai anthropic hf huggingface hub comet
    neptune mlflow aws azure gcp google github gitlab jwt cookie tls
    ssl pem munge write ingest app application fernet cipher vault consumer server user cluster
    registry clearml
""")
"""Words before ``key`` that make it a secret one."""
_TOKENS = _set("""
    api auth access refresh bearer session secret private personal hf hub huggingface github gh
    gitlab git id csrf xsrf jwt oauth oauth2 security service user bot slack wandb pypi npm deploy
    ci job registry admin root login client device push upload account openai vault jupyter notebook
    telegram discord x cluster runner agent server web app azure aws gcp google munge slurm sas my
    anthropic cohere replicate comet neptune read write hugging face
""")
"""Words before ``token`` that make it surely a secret."""
_OTHER_TOKENS = _set("""
    pad padding eos bos unk mask sep cls special image video audio vision num max min n per next
    last first prev previous start end stop begin total generated input output prompt target source
    context decoder encoder forced bad unexpected sub word text char byte unknown additional extra
    added each every single new one two mean avg average cost tokens batch padded masked
    ignore separator class placeholder patch time implicit
""")
"""Words before ``token`` that make it a piece of a text."""
_PASSES = _set("""
    db user smtp imap mysql pg postgres redis ftp http https proxy login admin root ssh sudo ldap
    rabbitmq mongo mongodb mail email database sql svc service account registry git
""")
"""Words before ``pass`` that make it surely a password."""
_OTHER_PASSES = _set("""
    forward backward single one two three first second third multi full last next data train eval
    num n each per test high low band by all optimizer gradient pre post validation epoch step
""")
"""Words before ``pass`` that make it a way through something."""
_SHORT = _set("pwd pw passe otp")
_ENDINGS = sorted((_ALWAYS["password"] | _ALWAYS["secret"] | _ALWAYS["api-key"]) - _SHORT)
"""Ends of a word that mean a secret whatever is before them: ``PGPASSWORD``."""
_NO_PASSES = _set("""
    bypass compass encompass surpass overpass underpass trespass askpass subpass midpass allpass
    renderpass singlepass
""")
"""Words that end with ``pass`` and are no password's."""
SPLIT = _set("key keys token tokens pass")
"""The same where what is before is one of the words above: ``githubtoken``."""
_QUERY = {
    "key": "key", "sig": "signature", "signature": "signature", "code": "code", "pass": "password",
    "x-amz-signature": "signature", "x-amz-credential": "credential", "sas": "signature",
    "x-goog-signature": "signature", "x-goog-credential": "credential", "pw": "password",
    "awsaccesskeyid": "key", "x-amz-security-token": "token",
}  # fmt: skip
"""Names that mean a secret in the query of a URL, and nothing elsewhere."""
_ALONE = _set("key pass session")
"""Whole names that are too common in texts, and still a secret's as a variable or an option."""
_PARTS = ("password", "passwd", "passphrase", "apikey", "credential")
"""The same wherever they are in the name of a variable or an option."""
_SYSTEM = frozenset(("PWD", "OLDPWD", "XDG_SESSION_ID"))
"""Variables of every shell and session, which tell no secret."""


@dataclass(frozen=True)
class Meaning:
    """What a name says about its value."""

    kind: str
    """What kind of secret it is."""
    sure: bool = True
    """Whether it is one; else the value has a say: ``token`` alone may be anything."""


def is_secret(name: str) -> bool:
    """Return whether a variable or an option of this name holds what nobody else should see.

    A name is all there is to go by, so names that may mean anything in a text (``KEY``, ``PASS``,
    ``TOKEN_2``) count here.
    """
    if name in _SYSTEM or not _NEEDLE.search(name):
        return False
    raw = name.encode(errors="replace")
    if meaning(raw) is not None or name.lower() in _ALONE:
        return True
    words = _words(raw)
    if not words or words[-1] in _HARMLESS or words[0] == "no":
        return False
    joined = name.lower().replace("_", "").replace("-", "")
    return "token" in words[:-1] or words[0] == "auth" or any(part in joined for part in _PARTS)


@functools.lru_cache(maxsize=4096)
def meaning(name: bytes, *, query: bool = False) -> Meaning | None:
    """Return what a name in a text means; None for no secret.

    Args:
        name: letters, digits, dots, dashes and underscores.
        query: whether it stands in the query of a URL.
    """
    if query and (kind := _QUERY.get(name.decode("ascii", "replace").lower())):
        return Meaning(kind=kind)
    words = _words(name)
    if not words or words[0] == "no":
        return None
    if name == b"KEY":  # in small letters it is a part of most tables and lists
        return Meaning(kind="key", sure=False)
    words[-1:] = _taken_apart(words[-1])
    last, before = words[-1], words[:-1]
    kind, sure = "", True
    if last in ("id", "ids"):
        kind = {"session": "session-key", "key": "key"}.get(before[-1] if before else "", "")
    elif last in ("pwd", "pw"):
        kind, sure = "password" if before != ["old"] else "", bool(before)
    elif last in ("key", "keys", "token", "tokens", "pass", "pat"):
        kind, sure = _by_last(last, before)
    elif last not in _HARMLESS:
        ending = next((one for one in _ENDINGS if last.endswith(one)), last)
        kind = _KIND.get(ending) or _within(words)
    return Meaning(kind=kind, sure=sure) if kind else None


def _words(name: bytes) -> list[str]:
    """Return the words of a name, without those at its end that change nothing."""
    words = [word.decode().lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1] in _IDLE or words[-1].isdigit()):
        words.pop()
    return words


def _taken_apart(word: str) -> list[str]:
    """``githubtoken`` as two words."""
    for end in SPLIT:
        before = word.removesuffix(end)
        if before != word and before in (_TOKENS if end[0] == "t" else _KEYS | _PASSES):
            return [before, end]
    before = word.removesuffix("pass")
    if before not in ("", word) and word not in _NO_PASSES and before not in _OTHER_PASSES:
        return [before, "pass"]  # ``MYPASS``
    return [word]


def _within(words: list[str]) -> str:
    """The kind of a name that means a secret by a word, or by two, that are not at its end."""
    for word in words[:-1]:
        if _KIND.get(word) in ("password", "secret", "credential", "api-key", "private-key"):
            return _KIND[word]
    pairs = list(zip(words, words[1:]))  # noqa: RUF007 - pairwise came with Python 3.10
    if any("".join(pair) in _KIND for pair in pairs):
        return "secret"
    # ``GITHUB_TOKEN_PROD``, ``API_KEY_PROD``; not the pair at the end, whose words have said no.
    inner = pairs[:-1]
    if any(word == "token" and before in _TOKENS for before, word in inner):
        return "token"
    return "key" if any(word == "key" and before in _KEYS for before, word in inner) else ""


def _by_last(last: str, before: list[str]) -> tuple[str, bool]:
    """The kind of a name that ends with a word that may mean anything, and whether it is sure."""
    previous = before[-1] if before else ""
    strong = any(word in _KIND for word in before)
    if last in ("key", "keys"):
        kind = {"api": "api-key", "private": "private-key", "session": "session-key"}
        return kind.get(previous, "key") if strong or previous in _KEYS else "", True
    if last == "pass":
        other = not before or previous in _OTHER_PASSES
        return "" if other else "password", strong or previous in _PASSES
    if strong or previous in _TOKENS:
        return "token", True
    other = last != "token" or previous in _OTHER_TOKENS or previous.isdigit()
    return "" if other else "token", False
