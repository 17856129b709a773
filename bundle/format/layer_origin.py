"""The origin of a layer: the value whose digest is the layer's id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..protocol.digest import Digest, canonical_json
from .manifest import Layer

ORIGIN_LIMIT = 1 << 16
"""The most bytes that an origin may have."""


@dataclass(frozen=True)
class Origin:
    """The source and the options of a layer; known before the layer is made."""

    kind: str
    """``wheel``, ``project``, ``trainer`` or ``asset``."""
    name: str
    """The distribution's normalized name; empty for the other kinds, where it is a label."""
    version: str
    """The distribution's version; empty for the other kinds."""
    content: Digest
    """Digest of the wheel, or of the tree."""
    options: Mapping[str, object]
    """Every option that shapes the layer's bytes, the format's version among them."""

    @property
    def id(self) -> Digest:
        """The id of the layer: the digest of all the fields above."""
        return Digest.of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes of the origin in the layer's head."""
        return canonical_json(asdict(self))

    def describes(self, layer: Layer) -> bool:
        """Return True if a layer's description fits its origin."""
        if (self.id, self.kind) != (layer.id, layer.kind):
            return False
        return self.kind != "wheel" or (self.name, self.version) == (layer.name, layer.version)


def parse(data: bytes) -> Origin:
    """Read an origin.

    Raises:
        ValueError: these bytes are not an origin.
    """
    try:
        raw = json.loads(data)
        origin = Origin(**{**raw, "content": Digest(raw["content"])})
    except (KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"a field is missing, or of another type: {exc}") from exc
    if not isinstance(origin.options, dict) or origin.to_bytes() != data:
        raise ValueError("it is not in its canonical form")
    return origin
