"""Which signatures are accepted, and that nothing of a bundle without one is started."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from bundle.checks.signature import statement
from stager.config.load import load
from stager.core.errors import BundleError, StagerError
from stager.core.store import Store
from stager.pack.bundle_file import read_manifest, seal
from stager.pack.members import copy_to
from stager.trust import (
    SignatureVerdict,
    decide_trust,
    examine,
    locate_signature,
    read_signature,
    read_signers,
)
from tests.support.building import Project
from tests.support.needs import needs
from tests.support.signing import ALICE, Key, allow, certified, make_key, requiring

ID = "5" * 64


class Asking:
    """A project that requires alice's signature, and a bundle of it that nobody has signed."""

    def __init__(self, project: Project, folder: Path, alice: Key) -> None:
        self.built, self.store = project.build(), project.store
        project.settings("alpha")
        self.signers = allow(folder, f"{ALICE} {alice.public}")
        self.config = requiring(load(project.root), self.signers)
        self.bundle, self.id = self.built.packed.path, self.built.packed.manifest.id

    def sign(self, key: Key, text: str = "") -> Path:
        """Put a signature beside the bundle; the bundle's path."""
        locate_signature(self.bundle).write_text(key.sign(text or statement(self.id)))
        return self.bundle

    def find_signer(self, bundle: Path | None = None) -> str:
        """Who has signed a bundle, as a job that begins finds out."""
        bundle = bundle or self.bundle
        verdict, trust = decide_trust(self.config, self.store, bundle, read_manifest(bundle).id)
        assert verdict is not None
        assert trust is not None
        return verdict.signer

    def refuse(self, match: str) -> StagerError:
        with pytest.raises(StagerError, match=match) as caught:
            self.find_signer()
        return caught.value


@pytest.fixture
def asking(project: Project, tmp_path: Path, alice: Key) -> Asking:
    return Asking(project, tmp_path, alice)


def test_without_settings_nothing_is_asked(project: Project, asking: Asking) -> None:
    found = decide_trust(load(project.root), project.store, asking.bundle, "")
    assert found == (None, None)


def test_a_signed_bundle_is_accepted(asking: Asking, alice: Key) -> None:
    refused = asking.refuse(r"is not signed, and trust\.require asks")
    assert "stager sign --key KEY" in refused.hint
    asking.sign(alice)
    assert asking.find_signer() == ALICE


def test_an_unknown_key_is_refused_and_named(asking: Asking, mallory: Key) -> None:
    bundle = asking.sign(mallory)
    refused = asking.refuse("that key may not sign")
    assert "ED25519 key SHA256:" in refused.message
    assert f"get it signed with one of the keys in {asking.signers}; only if" in refused.hint
    assert refused.message.count(str(bundle)) == 1, "the path is long enough"


def test_the_remedy_is_for_the_line_that_is_wrong(asking: Asking, alice: Key) -> None:
    asking.sign(alice)
    asking.signers.write_text(f"{ALICE}\n{ALICE} {alice.public}\n")
    assert asking.find_signer() == ALICE
    asking.signers.write_text(f'{ALICE} valid-before="20200101" {alice.public}\n')
    hint = asking.refuse("key has expired").hint
    assert f"another key of {asking.signers}, or change this key's line" in hint
    asking.signers.write_text("\n# nobody yet\n\n")
    assert "add a line for it there" in asking.refuse("may not sign").hint
    asking.signers.write_text(f"# people\n{ALICE}\n")
    asking.refuse("line 2: missing key")


def why(key: Key, line: str, namespace: str = "stager-bundle") -> str:
    """Why a signature is not accepted; empty if it is."""
    return examine(key.sign(statement(ID), namespace), ID, f"{line}\n").why


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{who} {key}", ""),
        ('{who} namespaces="stager-bundle" {key}', ""),
        ('{who} namespaces="file,stager-*" {key}', ""),
        ('{who} valid-after="20200101",valid-before="20990101" {key}', ""),
        ("bob@example.org,{who} {key}", ""),
        ("*@example.org {key}", ""),
        ("!eve,{who} {key}", ""),
        ("eve@example.org {other}\n# a comment\n{who} {key}", ""),
        ('{who} valid-before="20200101" {key}', "that key may not sign (line 1: key has expired"),
        ('{who} valid-after="20990101" {key}', "not yet valid"),
        ('{who} namespaces="git" {key}', "not permitted for use in signature namespace"),
        ("", "No principal matched"),
        ("garbage", "missing key"),
    ],
)
def test_whether_a_line_allows_it(alice: Key, mallory: Key, line: str, expected: str) -> None:
    found = why(alice, line.format(who=ALICE, key=alice.public, other=mallory.public))
    assert expected in found if expected else not found


def test_a_signature_for_another_purpose(alice: Key) -> None:
    found = why(alice, f"{ALICE} {alice.public}", namespace="git")
    assert found.startswith("it is no signature of this bundle"), found
    assert "namespace" in found


def test_a_signature_of_another_bundle(alice: Key) -> None:
    found = examine(alice.sign(statement("6" * 64)), ID, f"{ALICE} {alice.public}\n")
    assert (found.is_accepted, found.key) == (False, "")
    assert "incorrect signature" in found.why
    assert found.remedy.startswith("sign the bundle again")


@pytest.mark.parametrize(
    "text", ["", "no signature", "\0" * 99, "é", "-----BEGIN SSH SIGNATURE-----"]
)
def test_what_is_no_signature(alice: Key, text: str) -> None:
    found = examine(text, ID, f"{ALICE} {alice.public}\n")
    assert not found.is_accepted
    assert "no signature of this bundle" in found.why


def test_without_ssh_keygen(asking: Asking, alice: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    asking.sign(alice)
    monkeypatch.setenv("PATH", "/nonexistent")
    asking.refuse("cannot start ssh-keygen")


def test_in_a_folder_of_a_group_others_can_replace_the_file(tmp_path: Path) -> None:
    """A group that a user has alone is the user; a folder has no other where umask is 002."""
    needs("root")
    folder = tmp_path / "lab"
    folder.mkdir()
    signers = folder / "signers"
    signers.touch(0o644)
    folder.chmod(0o775)
    assert read_signers(signers) == ""
    os.chown(folder, -1, 12345)
    with pytest.raises(StagerError, match="in a folder in which a group can replace it") as caught:
        read_signers(signers)
    assert caught.value.hint.startswith(f"chmod g-w {folder}")
    folder.chmod(0o1775)
    assert read_signers(signers) == ""


def test_a_signature_that_is_a_pipe_keeps_nobody_waiting(asking: Asking) -> None:
    os.mkfifo(locate_signature(asking.bundle))
    asking.refuse("cannot be read: is not a regular file")


def test_a_file_that_others_may_change(asking: Asking, alice: Key) -> None:
    asking.sign(alice)
    for mode in (0o664, 0o646, 0o666):
        asking.signers.chmod(mode)
        refused = asking.refuse("may be changed by others: its mode is 06")
        assert refused.hint == f"chmod go-w {asking.signers}"
    asking.signers.chmod(0o644)
    asking.signers.parent.chmod(0o777)
    asking.refuse("in which anyone can replace it")
    asking.signers.parent.chmod(0o755)
    asking.signers.unlink()
    asking.refuse(r"trust\.allowed-signers: .* cannot be read")


def flip(bundle: Path, place: int) -> None:
    """Change one bit; a second time, change it back."""
    with bundle.open("r+b") as handle:
        handle.seek(place)
        byte = handle.read(1)
        handle.seek(place)
        handle.write(bytes([byte[0] ^ (1 << place % 8)]))


def test_an_altered_bundle_is_refused_before_anything_of_it_runs(
    asking: Asking, alice: Key, tmp_path: Path
) -> None:
    """All of it is read first; that a node publishes nothing of it, torture's ``bundles`` hold."""
    bundle = asking.sign(alice)
    copy = copy_to(bundle, tmp_path / "copy.tar")
    shutil.copy(locate_signature(bundle), locate_signature(copy))
    size = copy.stat().st_size
    draw = random.Random(size)
    for _ in range(15):  # half of the places are anywhere, half before and behind the large layers
        places = [draw.randrange(size), draw.randrange(size), draw.randrange(900_000)]
        for place in (*places, draw.randrange(size - 4096, size)):
            flip(copy, place)
            with pytest.raises(BundleError):
                asking.find_signer(copy)
            flip(copy, place)
    assert asking.find_signer(copy) == ALICE


def test_an_altered_bundle_in_the_store_is_noticed(asking: Asking, alice: Key) -> None:
    """The store has a note that it has written the files, one of which is another one now."""
    asking.sign(alice)
    layer = asking.store.layer(asking.built.made.layers[-1].id)
    flip(layer, layer.stat().st_size - 30)  # whatever is read of the rest
    asking.refuse("is not what was signed")


def test_a_note_of_another_store_counts_for_nothing(
    asking: Asking, alice: Key, tmp_path: Path
) -> None:
    """Whoever owns the folder of a bundle can write it there, for a bundle that is altered."""
    bundle = asking.sign(alice)
    other = Store(tmp_path / "other")
    copy = copy_to(bundle, other.bundles / bundle.name)
    shutil.copy(locate_signature(bundle), locate_signature(copy))
    flip(copy, copy.stat().st_size - 3000)
    seal(other, copy, read_manifest(bundle))
    with pytest.raises(BundleError, match="is not what was signed"):
        asking.find_signer(copy)


def test_an_altered_signature_is_refused_or_means_the_same(alice: Key) -> None:
    text = alice.sign(statement(ID))
    draw = random.Random(7)
    for _ in range(40):
        place = draw.randrange(len(text))
        changed = (
            text[:place] + chr(ord(text[place]) ^ (1 << draw.randrange(7))) + text[place + 1 :]
        )
        found = examine(changed, ID, f"{ALICE} {alice.public}\n")
        assert found.signer in ("", ALICE)
        assert not found.is_accepted or "".join(changed.split()) == "".join(text.split()), place


def test_a_signature_is_read_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "large.sig").write_bytes(b"x" * (1 << 20))
    text = read_signature(tmp_path / "large.sig")
    assert text is not None
    assert len(text) == 1 << 16


EXPIRED = ("-n", ALICE, "-V", "20200101:20210101")


@pytest.fixture
def own(tmp_path: Path, alice: Key) -> Key:
    """A key of which no line of any file knows."""
    return make_key(tmp_path, "own")


@pytest.fixture(scope="session")
def line(alice: Key) -> str:
    """The line of the authority, for which alice's key stands in."""
    return f"*@example.org cert-authority {alice.public}"


def verdict(key: Key, *lines: str) -> SignatureVerdict:
    return examine(key.sign(statement(ID)), ID, "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("names", [ALICE, f"eve@other.org,{ALICE}", f"{ALICE},bob@example.org"])
def test_a_certified_key_may_sign(own: Key, alice: Key, line: str, names: str) -> None:
    found = verdict(certified(alice, own, "-n", names), "# of the lab", line)
    assert (found.is_accepted, found.signer, found.why) == (True, ALICE, "")
    assert found.key.startswith("ED25519-CERT key SHA256:")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (EXPIRED, "Certificate invalid: expired"),
        (("-n", ALICE, "-V", "+520w:+521w"), "Certificate invalid: not yet valid"),
        (("-n", "eve@other.org"), "Certificate invalid: name is not a listed principal"),
        ((), "Certificate lacks principal list"),
        (("-h", "-n", ALICE), "Certificate invalid: not a user certificate"),
    ],
)
def test_a_certificate_that_does_not_hold(
    own: Key, alice: Key, line: str, options: tuple[str, ...], why: str
) -> None:
    found = verdict(certified(alice, own, *options), "# of the lab", line)
    assert not found.is_accepted
    assert "that certificate does not hold (line 2: " in found.why
    assert why in found.why
    assert "a certificate that holds" in found.remedy


def test_a_certificate_of_another_authority(own: Key, mallory: Key, line: str) -> None:
    found = verdict(certified(mallory, own, "-n", ALICE), line)
    assert (found.is_accepted, found.remedy[:10]) == (False, "get it sig")
    assert "that key may not sign" in found.why


def test_a_line_is_for_a_key_or_for_its_certificates(own: Key, alice: Key, line: str) -> None:
    assert not verdict(alice, line).is_accepted  # an authority is no signer
    with_it = certified(alice, own, "-n", ALICE)
    assert not verdict(with_it, f"{ALICE} {alice.public}").is_accepted
    found = verdict(own, line)  # signed without the certificate
    assert not found.is_accepted
    assert "with a certificate, sign with --key KEY-cert.pub" in found.remedy
