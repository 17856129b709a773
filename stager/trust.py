"""Signing bundles with SSH keys, and deciding whose signature is accepted."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.checks.signature import (
    KEYGEN,
    NAMESPACE,
    REFUSED,
    SECONDS,
    open_as_path,
    parse_keygen_lines,
    statement,
    verify_signature,
)
from bundle.protocol.dataclass import dataclass
from bundle.protocol.job import Trust
from bundle.regex import compile_lazily
from bundle.system.processes import CompletedCommand

from .config.load import Config
from .core.errors import BundleError, ConfigError, StagerError
from .core.files import open_regular, write_output
from .core.processes import CommandError, follow_command, run_with_input
from .core.store import Store
from .pack.bundle_file import ChosenBundle, is_sealed, open_bundle, read_manifest

if TYPE_CHECKING:
    from .pack.members import InspectedSignature


_TOUCH = compile_lazily(r"user presence", re.IGNORECASE)  # of a hardware key that is to be touched


def run(argv: Sequence[str], text: str) -> CompletedCommand:
    """Run a command that reads a text, to its end."""
    try:
        return run_with_input(argv, text, environment=os.environ, timeout=SECONDS)
    except CommandError as exc:
        if exc.completed.returncode == REFUSED:
            return exc.completed
        raise StagerError(
            f"{exc.message.splitlines()[0]}: it cannot check signatures",
            hint="run the command again; if it fails again, install OpenSSH 8.2 or newer",
            context=exc.context,
        ) from exc


def _make_signature(key: Path, text: Path, say: Callable[[str], None]) -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        if _TOUCH.search(line):
            say(line)
        else:
            lines.append(line)

    argv = [KEYGEN, "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(text)]
    ended = follow_command(argv, take, on_talk=take)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.returncode:
        raise StagerError(
            f"{KEYGEN} could not sign with {key}: {lines[-1] if lines else 'it did not say why'}",
            hint="name a private key, or the public key (.pub) of one that your ssh-agent holds: "
            "`ssh-add KEY` asks for its passphrase",
            context=lines[:-1],
        )
    for line in lines:
        say(line)


MOST_SIGNERS_BYTES = 1 << 16  # length of the file: it travels to every node


def read_signers(path: Path) -> str:
    """Return the content of an ``allowed_signers`` file."""
    setting = f"trust.allowed-signers: {path}"
    try:
        with open_regular(path) as handle:
            _refuse_writers(setting, path, os.fstat(handle.fileno()))
            data = handle.read(MOST_SIGNERS_BYTES + 1)
    except OSError as exc:
        raise ConfigError(
            f"{setting} cannot be read: {exc.strerror or exc}",
            hint="name the file with the keys that may sign, see ssh-keygen(1), ALLOWED SIGNERS",
        ) from exc
    if len(data) > MOST_SIGNERS_BYTES:
        raise ConfigError(
            f"{setting} has more than {MOST_SIGNERS_BYTES >> 10} KiB",
            hint="let one key certify the others: a line with cert-authority, see ssh-keygen(1)",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{setting} is not a text", hint="ssh-keygen(1) has its form") from exc


def _refuse_writers(setting: str, path: Path, status: os.stat_result) -> None:
    folder = path.parent.stat()
    others = bool(folder.st_mode & stat.S_IWOTH)
    group = folder.st_mode & stat.S_IWGRP and not _has_nobody_else(folder.st_gid)
    if (others or group) and not folder.st_mode & stat.S_ISVTX:  # there only owners replace a file
        who, bit = ("anyone", "o-w") if others else ("a group", "g-w")
        fault = f"is in a folder in which {who} can replace it"
        hint = f"chmod {bit} {path.parent}, or use a copy elsewhere"
    elif status.st_uid not in (os.geteuid(), 0):
        fault = "belongs to another user, who may change it"
        hint = "use a copy of your own, or one of root's"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = f"may be changed by others: its mode is {stat.S_IMODE(status.st_mode):04o}"
        hint = f"chmod go-w {path}"
    else:
        return
    raise ConfigError(f"{setting} {fault}", hint=hint)


def _has_nobody_else(gid: int) -> bool:
    """Return whether a group is root's or user-private: there the umask is often 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return gid == 0
    own = (user.pw_gid, user.pw_name) == (gid, group.gr_name)
    return gid == 0 or (own and set(group.gr_mem) <= {user.pw_name})


# A signature is that of the bundle's id. Where one is required, every byte of the bundle is
# compared with that id here, before anything in the bundle is started; the nodes do so again.

SUFFIX = ".sig"  # the signature of a bundle lies beside it, under its name with this ending
MOST_SIGNATURE_BYTES = 1 << 16
_LINES = 4
# What ``ssh-keygen`` says of a good signature's key, of a certificate by a line's key that does
# not hold, and of a line with the key whose conditions do not hold.
_KEY = compile_lazily(r"with (.+ key SHA256:\S+)")
_CERTIFICATE = compile_lazily(r"line (\d+): no valid principals found")
_OF_LINE = compile_lazily(r"expired|not yet valid|not permitted")
_SIGN_AGAIN = "sign the bundle again (`stager sign --key KEY`), or get its own signature"
_ADD_LINE = (
    "get it signed with one of the keys in {signers}; only if you know whose key this is, and "
    "trust them, add a line for it there; with a certificate, sign with --key KEY-cert.pub"
)
_CHANGE_LINE = "sign it with another key of {signers}, or change this key's line there"
_NEW_CERTIFICATE = "sign it with a certificate that holds, or with another key of {signers}"


@dataclass(frozen=True, kw_only=True)
class SignatureVerdict:
    """The decision on the signature of a bundle."""

    why: str  # why the signature is not accepted; empty if it is
    key: str = ""  # the key that has signed this bundle, whoever's it is; empty if none has
    remedy: str = ""  # what would make it accepted; ``{signers}`` stands for their file
    signer: str = ""  # as the file of allowed signers calls them; empty for nobody of these

    @property
    def is_accepted(self) -> bool:
        """Return whether one of the allowed signers has signed the bundle."""
        return bool(self.signer)

    @property
    def words(self) -> str:
        """Return the decision in words."""
        if self.is_accepted:
            return f"signed by {self.signer} ({self.key})"
        return f"signed with {self.key}: {self.why}" if self.key else self.why


def locate_signature(bundle: Path) -> Path:
    """Return where the signature of a bundle is, whether it exists or not."""
    return bundle.with_name(bundle.name + SUFFIX)


def read_signature(path: Path) -> str | None:
    """Return a signature; None if there is none."""
    try:
        with open_regular(path) as handle:
            return handle.read(MOST_SIGNATURE_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise BundleError(
            f"the signature {path} cannot be read: {exc.strerror or exc}",
            hint="check the path and its permissions",
        ) from exc


def decide_trust(
    config: Config, store: Store, bundle: Path, bundle_id: str
) -> tuple[SignatureVerdict | None, Trust | None]:
    """Decide on a bundle that is about to be used, and what nodes need to check it, if required."""
    if config.trust.allowed_signers is None and not config.trust.require:
        return None, None
    signature = read_signature(locate_signature(bundle))
    beside = f"{SUFFIX} file beside it"
    decision = decide(config, signature, bundle_id, what=f"the bundle {bundle}", place=beside)
    if config.trust.require:
        _refuse_altered(store, bundle, bundle_id)
    return decision


def _refuse_altered(store: Store, bundle: Path, bundle_id: str) -> None:
    """Read all of a bundle, unless this store has written it and it has not changed since."""
    with open_bundle(bundle, bundle_id) as held:
        if is_sealed(store, bundle, held.manifest):
            return
        from .pack.members import MemberError, refuse_damage  # not before: it takes a while

        try:
            refuse_damage(held)
        except MemberError as exc:
            raise BundleError(
                f"{bundle} is not what was signed: {exc}",
                hint="it was changed after it was built: copy it again; nothing of it has run",
            ) from exc


def inspect_signature(
    config: Config | None, bundle: Path, bundle_id: str
) -> InspectedSignature | None:
    """Return what is known of the signature of a bundle that nobody is about to use."""
    from .pack.members import InspectedSignature  # not before: it takes a while

    place = locate_signature(bundle)
    signature = read_signature(place)
    if signature is None:
        return None
    path = config.trust.allowed_signers if config else None
    verdict = examine(signature, bundle_id, read_signers(path) if path else None)
    return InspectedSignature(
        file=place,
        accepted=verdict.is_accepted,
        signer=verdict.signer,
        key=verdict.key,
        why=verdict.why,
    )


def decide(
    config: Config, signature: str | None, bundle_id: str, *, what: str, place: str
) -> tuple[SignatureVerdict, Trust | None]:
    """Decide on a signature, see :func:`decide_trust`; ``what`` and ``place`` are for messages."""
    path = config.trust.allowed_signers
    signers = read_signers(path) if path else None
    verdict = examine(signature, bundle_id, signers)
    if not config.trust.require:
        return verdict, None
    if verdict.is_accepted and signature is not None and signers is not None:
        return verdict, Trust(signers=signers, signer=verdict.signer, signature=signature)
    if signature is None:
        raise BundleError(
            f"{what} is not signed, and trust.require asks for a signature: there is no {place}",
            hint="sign it with `stager sign --key KEY`; or get the signature from whoever made it",
        )
    remedy = verdict.remedy.format(signers=path)
    raise BundleError(
        f"the signature of {what} is not accepted: {verdict.words}",
        hint="; ".join(filter(None, ("nothing of it has run", remedy))),
    )


def examine(signature: str | None, bundle_id: str, signers: str | None) -> SignatureVerdict:
    """Return the decision on a signature."""
    if signature is None:
        return SignatureVerdict(why="not signed")
    try:
        return _examine_with_keygen(signature, bundle_id, signers)
    except StagerError as exc:
        return SignatureVerdict(why=f"the signature cannot be checked: {exc.message}")


def _examine_with_keygen(signature: str, bundle_id: str, signers: str | None) -> SignatureVerdict:
    with open_as_path(signature) as path:
        argv = [KEYGEN, "-Y", "check-novalidate", "-n", NAMESPACE, "-s", path]
        made = run(argv, statement(bundle_id))
    if made.returncode:
        why = f"it is no signature of this bundle ({_why(made)})"
        return SignatureVerdict(why=why, remedy=_SIGN_AGAIN)
    named = _KEY.search(made.stdout)
    key = named[1] if named else "a key"
    if signers is None:
        return SignatureVerdict(why="there is no trust.allowed-signers to compare it with", key=key)
    with open_as_path(signature) as path, open_as_path(signers) as allowed:
        found = run([KEYGEN, "-Y", "find-principals", "-s", path, "-f", allowed], "")
    asked = Trust(signers=signers, signer="", signature=signature)
    if found.returncode:
        why = _explain_certificate(found, asked, bundle_id)
        if why:
            why = f"that certificate does not hold ({why})"
            return SignatureVerdict(why=why, key=key, remedy=_NEW_CERTIFICATE)
        remedy = _CHANGE_LINE if _OF_LINE.search(_why(found)) else _ADD_LINE
        why = f"that key may not sign ({_why(found)})"
        return SignatureVerdict(why=why, key=key, remedy=remedy)
    why = "nobody's"
    for signer in _list_principals(found.stdout):
        done = verify_signature(replace(asked, signer=signer), bundle_id, run)
        if done.returncode == 0:
            return SignatureVerdict(why="", key=key, signer=signer)
        why = _why(done)
    return SignatureVerdict(why=f"that key may not sign ({why})", key=key, remedy=_CHANGE_LINE)


def _explain_certificate(found: CompletedCommand, trust: Trust, bundle_id: str) -> str:
    """Return why a certificate does not hold; empty if it is none, or no line has its authority.

    ``verify`` says why, for somebody whom the line is for: its own pattern will do.
    """
    for certificate in filter(None, map(_CERTIFICATE.fullmatch, parse_keygen_lines(found))):
        line = trust.signers.split("\n")[int(certificate[1]) - 1]
        whom = line.split(maxsplit=1)[0].split(",")[0].strip('"!')
        done = verify_signature(replace(trust, signer=whom), bundle_id, run)
        if done.returncode:
            return _why(done)
    return ""


def _list_principals(text: str) -> list[str]:
    """Return the principals: older versions of ``ssh-keygen`` print those of a line as one."""
    names = text.replace("\n", ",").split(",")
    return [name.strip() for name in names if name.strip() and not name.startswith("!")]


def _why(done: CompletedCommand) -> str:
    lines = [line.rstrip(".") for line in parse_keygen_lines(done)[-_LINES:]]
    return "; ".join(lines) or f"ssh-keygen ended with status {done.returncode}"


@dataclass(frozen=True, kw_only=True)
class SignResult:
    """The result of ``stager sign``."""

    bundle: Path
    id: str
    signature: Path
    key: str


def sign(chosen: ChosenBundle, key: Path, say: Callable[[str], None]) -> SignResult:
    """Write the signature of a bundle beside it; one that is there is replaced."""
    bundle_id = read_manifest(chosen.path, chosen.id).id
    with tempfile.TemporaryDirectory(prefix="stager-sign-") as folder:
        text = Path(folder) / "statement"
        text.write_text(statement(bundle_id), encoding="ascii")
        _make_signature(key, text, say)
        signature = read_signature(locate_signature(text)) or ""
    verdict = examine(signature, bundle_id, None)
    if not verdict.key:
        raise StagerError(f"{key} has made no signature: {verdict.why}")
    place = locate_signature(chosen.path)
    _write(place, signature)
    return SignResult(bundle=chosen.path, id=bundle_id, signature=place, key=verdict.key)


def copy_signature(signature: Path, copy: Path) -> None:
    """Write a signature beside a copy of its bundle."""
    _write(locate_signature(copy), read_signature(signature) or "")


def _write(place: Path, signature: str) -> None:
    hint = "it lies beside its bundle: sign a copy that is in a folder of yours"
    with write_output(place, hint=hint) as handle:
        handle.write(signature.encode())
