"""``stager sign``: a signature beside the bundle, made by ``ssh-keygen``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bundle.checks.signature import statement

from ..core.errors import StagerError
from ..core.files import replacing
from ..pack.bundle_file import ChosenBundle, manifest_of
from . import keygen
from .check import examine, read_signature, signature_of


@dataclass(frozen=True, kw_only=True)
class SignResult:
    """The result of ``stager sign``."""

    bundle: Path
    """The bundle."""
    id: str
    """Its id, which is what was signed."""
    signature: Path
    """The signature."""
    key: str
    """The key that has signed, as ``ssh-keygen`` names it."""


def sign(chosen: ChosenBundle, key: Path, say: Callable[[str], None]) -> SignResult:
    """Write the signature of a bundle beside it; one that is there is replaced.

    Raises:
        BundleError: the bundle is damaged, or another one.
        StagerError: it cannot be signed, or the signature cannot be written.
    """
    bundle_id = manifest_of(chosen.path, chosen.id).id
    signature = _signature(bundle_id, key, say)
    place = signature_of(chosen.path)
    _write(place, signature)
    return SignResult(
        bundle=chosen.path,
        id=bundle_id,
        signature=place,
        key=examine(signature, bundle_id, None).key,
    )


def copy_signature(signature: Path, copy: Path) -> Path:
    """Write a signature beside a copy of its bundle, and return where.

    Raises:
        StagerError: it cannot be written.
    """
    place = signature_of(copy)
    _write(place, read_signature(signature) or "")
    return place


def _write(place: Path, signature: str) -> None:
    try:
        with replacing(place) as handle:
            handle.write(signature.encode())
    except OSError as exc:
        raise StagerError(
            f"the signature {place} cannot be written: {exc.strerror or exc}",
            hint="it lies beside its bundle: sign a copy that is in a folder of yours",
        ) from exc


def _signature(bundle_id: str, key: Path, say: Callable[[str], None]) -> str:
    """Return the signature of a bundle's id, checked against it."""
    with tempfile.TemporaryDirectory(prefix="stager-sign-") as folder:
        text = Path(folder) / "statement"
        text.write_text(statement(bundle_id), encoding="ascii")
        keygen.make_signature(key, text, say)
        signature = read_signature(signature_of(text)) or ""
    verdict = examine(signature, bundle_id, None)
    if not verdict.key:
        raise StagerError(f"{key} has made no signature: {verdict.why}")
    return signature
