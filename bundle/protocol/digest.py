"""Digests, and the canonical form of JSON that they are made of."""

from __future__ import annotations

import hashlib
import json
import re

_HEX64 = re.compile(r"[0-9a-f]{64}")


class Digest(str):
    """A sha256 in lower-case hexadecimal; creating one checks it."""

    __slots__ = ()

    def __new__(cls, value: str) -> Digest:
        """Check and wrap; raises ValueError for anything but 64 hexadecimal digits."""
        if not isinstance(value, str) or not _HEX64.fullmatch(value):
            raise ValueError(f"not a sha256 in hexadecimal: {value!r}")
        return super().__new__(cls, value)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """Return the digest of these bytes."""
        return cls(hashlib.sha256(data).hexdigest())


def canonical_json(value: object) -> bytes:
    """Return the canonical bytes of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
