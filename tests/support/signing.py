"""SSH keys of people who sign bundles, made by the real ``ssh-keygen``."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from bundle.checks.signature import NAMESPACE, statement
from bundle.protocol.job import Trust
from stager.config.load import Config, TrustConfig
from tests.support.needs import needs

ALICE = "alice@example.org"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Key:
    private: Path

    @property
    def public(self) -> str:
        """The type and the public key, as one line of ``allowed_signers`` has them."""
        return " ".join(self.private.with_suffix(".pub").read_text().split()[:2])

    def sign(self, text: str, namespace: str = NAMESPACE) -> str:
        argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(self.private)]
        return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout

    def trusted(self, bundle_id: str, options: str = "") -> Trust:
        return Trust(
            signers=f"{ALICE} {options} {self.public}\n",
            signer=ALICE,
            signature=self.sign(statement(bundle_id)),
        )


def certified(authority: Key, key: Key, *options: str) -> Key:
    """Certify a key for some principals (``-n``), a time (``-V``); the pair, by the certificate."""
    argv = ["ssh-keygen", "-q", "-s", str(authority.private), "-I", "of-a-test", *options]
    subprocess.run([*argv, f"{key.private}.pub"], check=True)
    return Key(private=Path(f"{key.private}-cert.pub"))


def make_key(folder: Path, name: str, passphrase: str = "") -> Key:
    private = folder / name
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", str(private)]
    subprocess.run(argv, check=True)
    return Key(private=private)


def allow(folder: Path, *lines: str) -> Path:
    """Write a file of allowed signers that nobody else may change."""
    path = folder / "allowed_signers"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o644)
    return path


def allow_for(folder: Path, key: Key, seconds: int) -> float:
    """Let a key sign for so many seconds from now; return when it no longer can."""
    end = math.ceil(time.time()) + seconds
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(end))
    allow(folder, f'{ALICE} valid-before="{stamp}" {key.public}')
    return end + 1  # it is good for all of the second that is named


def begun_in_time(folder: Path, key: Key, begin: Callable[[], T | None]) -> T:
    """Return what has begun while a key could still sign, once it cannot any more."""
    seconds = 15
    while True:
        end = allow_for(folder, key, seconds)
        begun = begin()
        if begun is not None:
            time.sleep(max(0.0, end - time.time()))
            return begun
        seconds *= 2


def requiring(config: Config, signers: Path) -> Config:
    return replace(config, trust=TrustConfig(allowed_signers=signers, require=True))


@pytest.fixture(scope="session")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Key:
    needs("ssh-keygen")
    return make_key(tmp_path_factory.mktemp("alice"), "alice")


@pytest.fixture(scope="session")
def mallory(tmp_path_factory: pytest.TempPathFactory) -> Key:
    needs("ssh-keygen")
    return make_key(tmp_path_factory.mktemp("mallory"), "mallory")
