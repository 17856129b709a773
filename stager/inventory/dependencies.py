"""The dependencies between the packages of a bundle, as their metadata says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_EXTRAS_LIMIT = 50
"""Extras of one package that are looked at: more are nobody's but an attacker's."""


def dependencies(
    requires: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the packages that each package needs, of those that are there.

    A requirement of an extra counts if another package asks for that extra.
    """
    parsed = {name: tuple(_parsed(texts)) for name, texts in requires.items()}
    extras: dict[str, set[str]] = {name: {""} for name in parsed}
    found: dict[str, set[str]] = {name: set() for name in parsed}
    pending = [(name, "") for name in parsed]
    while pending:
        name, extra = pending.pop()
        for requirement in parsed[name]:
            needed = str(canonicalize_name(requirement.name))
            if needed not in parsed or not _applies(requirement, extra, environment):
                continue
            if needed != name:
                found[name].add(needed)
            known = extras[needed]
            for more in sorted(requirement.extras - known)[: _EXTRAS_LIMIT - len(known)]:
                known.add(more)
                pending.append((needed, more))
    return {name: tuple(sorted(needed)) for name, needed in found.items()}


def _parsed(texts: Iterable[str]) -> Iterable[Requirement]:
    for text in texts:
        try:
            yield Requirement(text)
        except (InvalidRequirement, RecursionError):
            continue  # old metadata, or nonsense: the resolver could not read it either


def _applies(requirement: Requirement, extra: str, environment: Mapping[str, str]) -> bool:
    if requirement.marker is None:
        return not extra
    try:
        return requirement.marker.evaluate({**environment, "extra": extra})
    except (ValueError, RecursionError):  # a comparison that has no meaning
        return False
