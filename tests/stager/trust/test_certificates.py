"""Signatures with OpenSSH certificates: who may sign is whom an allowed authority has certified."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.checks.signature import statement
from stager.trust import SignatureVerdict, examine
from tests.support.signing import ALICE, Key, certified, make_key

ID = "5" * 64
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
    assert (found.accepted, found.signer, found.why) == (True, ALICE, "")
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
    assert not found.accepted
    assert "that certificate does not hold (line 2: " in found.why
    assert why in found.why
    assert "a certificate that holds" in found.remedy


def test_a_certificate_of_another_authority(own: Key, mallory: Key, line: str) -> None:
    found = verdict(certified(mallory, own, "-n", ALICE), line)
    assert (found.accepted, found.remedy[:10]) == (False, "get it sig")
    assert "that key may not sign" in found.why


def test_an_authority_is_no_signer(alice: Key, line: str) -> None:
    assert not verdict(alice, line).accepted


def test_a_certified_key_that_signs_without_its_certificate(
    own: Key, alice: Key, line: str
) -> None:
    certified(alice, own, "-n", ALICE)
    found = verdict(own, line)
    assert not found.accepted
    assert "with a certificate, sign with --key KEY-cert.pub" in found.remedy


def test_a_line_for_a_key_is_none_for_its_certificates(own: Key, alice: Key) -> None:
    found = verdict(certified(alice, own, "-n", ALICE), f"{ALICE} {alice.public}")
    assert not found.accepted
