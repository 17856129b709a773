"""The lines of a wheel's RECORD: what each member must be (the binary distribution format)."""

from __future__ import annotations

import base64
import binascii

from installer.records import Hash, RecordEntry

_MISMATCH = "does not have the size and hash that RECORD gives"


def algorithm(record: RecordEntry | None) -> str:
    """Return the name of the hash in a line of RECORD; empty for none."""
    if record is None or record.hash_ is None:
        return ""
    return record.hash_.name


def digest(record: RecordEntry) -> bytes | None:
    """Return the raw sha256 in a line of RECORD; None if it is none."""
    value = record.hash_.value if record.hash_ is not None else ""
    try:
        raw = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw if record_hash(raw).value == value else None


def mismatch(record: RecordEntry) -> str:
    """Return the fault of a member that is not what its line says."""
    return f"{record.path} {_MISMATCH}"


def is_mismatch(fault: str) -> bool:
    """Return whether a fault is that of a member that is not what its line says."""
    return fault.endswith(_MISMATCH)


def record_hash(sha256: bytes) -> Hash:
    """Return a raw sha256 as RECORD writes it."""
    return Hash("sha256", base64.urlsafe_b64encode(sha256).decode().rstrip("="))
