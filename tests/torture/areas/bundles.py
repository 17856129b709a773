"""Altered bundles: flipped, cut, extended, their members swapped, two of them spliced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from bundle.format.archive import BundleFile
from bundle.format.manifest import BLOCK, count_padding
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed

from ..checks import nothing_half_written
from ..product import refused, sound, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require
from ..world import tree_of, unpack_below

_COMMANDS = 25
"""Of so many rounds one goes through the command line."""


def play(round_: Round) -> str:
    """Alter a copy of a bundle, and try to make an environment of it."""
    real = round_.world.bundle
    assert real is not None
    kind = round_.rng.choice(sorted(_FAULTS))
    data = bytearray(real.path.read_bytes())
    round_.did(f"{kind}: {_FAULTS[kind](data, round_.rng, round_)}")
    path = round_.folder / real.path.name
    path.write_bytes(data)
    same = bytes(data) == real.path.read_bytes()
    if round_.number % _COMMANDS == _COMMANDS - 1:
        return _by_command(round_, path, same=same)
    return _by_call(round_, path, real, same=same)


def _by_call(round_: Round, path: Path, real: Packed, *, same: bool) -> str:
    processes = round_.rng.choice((1, 1, 2))
    try:
        made = unpack_below(round_.nodes, path, real.manifest.id, processes)
    except NodeError as exc:
        problem = exc.problem
        said = (problem.what, problem.where, problem.why, problem.fix)
        require(all(said), "the problem says what, where, why and what to do", said)
        require(not same, "a sound bundle is taken", exc)
        nothing_half_written(round_.nodes, "envs")
        return REFUSED
    require(tree_of(made) == round_.world.unpacked, "the environment is the same bytes")
    require(same, "an altered bundle is refused")
    return SAME


def _by_command(round_: Round, path: Path, *, same: bool) -> str:
    """Let every command that takes a bundle meet it."""
    round_.use("project", "home")
    round_.nodes.mkdir()
    argv = round_.rng.choice(
        (
            ("exec", "--bundle", str(path), "--", "python", "-c", "import alpha"),
            ("verify", "--allocation", "local", "--bundle", str(path)),
            ("script", "--bundle", str(path), "--", "train.py"),
            ("inspect", "--files", str(path)),
        )
    )
    round_.did(f"stager {' '.join(argv)}")
    done = sound(stager(round_, *argv, process=True))
    # Looking at a bundle, or making a script of it, reads no more than its description.
    if done.code == 0 and (same or argv[0] in ("inspect", "script")):
        return SAME
    refused(done)
    nothing_half_written(round_.nodes, "envs")
    return REFUSED


def regions(path: Path) -> list[tuple[str, int, int]]:
    """Return every part of a bundle's bytes: name, start and end."""
    with BundleFile(str(path)) as bundle:
        found = []
        end = 0
        for name, size in bundle.manifest.members():
            start = bundle.offset(name)
            found += [(f"header of {name}", start - BLOCK, start), (name, start, start + size)]
            end = start + size + count_padding(size)
            if count_padding(size):
                found.append((f"padding of {name}", start + size, end))
    return [*found, ("end", end, path.stat().st_size)]


# --- what is done to a bundle --------------------------------------------------------------------

Fault = Callable[[bytearray, Random, Round], str]


def _place(rng: Random, round_: Round) -> tuple[str, int, int]:
    assert round_.world.bundle is not None
    return rng.choice([part for part in regions(round_.world.bundle.path) if part[2] > part[1]])


def _flip(data: bytearray, rng: Random, round_: Round) -> str:
    name, start, end = _place(rng, round_)
    at, bit = rng.randrange(start, end), rng.randrange(8)
    data[at] ^= 1 << bit
    return f"bit {bit} at {at}, in {name}"


def _overwrite(data: bytearray, rng: Random, round_: Round) -> str:
    name, start, end = _place(rng, round_)
    at = rng.randrange(start, end)
    size = min(rng.choice((1, 8, 512, 5000)), len(data) - at)
    data[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return f"{size} bytes at {at}, in {name}"


def _cut(data: bytearray, rng: Random, round_: Round) -> str:
    name, start, end = _place(rng, round_)
    at = rng.choice((start, rng.randrange(start, end), end - 1))
    del data[at:]
    return f"at {at}, in {name}"


def _extend(data: bytearray, rng: Random, round_: Round) -> str:
    size = rng.choice((1, 512, 1024, 10_240))
    data += rng.choice((bytes(size), rng.randbytes(size)))
    return f"by {size} bytes"


def _insert(data: bytearray, rng: Random, round_: Round) -> str:
    name, start, end = _place(rng, round_)
    at, size = rng.randrange(start, end), rng.choice((1, 512))
    data[at:at] = bytes(size)
    return f"{size} bytes at {at}, in {name}"


def _remove(data: bytearray, rng: Random, round_: Round) -> str:
    name, start, end = _place(rng, round_)
    at = rng.randrange(start, end)
    size = rng.choice((1, 512, end - at))
    del data[at : at + size]
    return f"{size} bytes at {at}, in {name}"


def _swap(data: bytearray, rng: Random, round_: Round) -> str:
    assert round_.world.bundle is not None
    one, two = sorted(rng.sample(regions(round_.world.bundle.path), 2), key=lambda part: part[1])
    first, second = bytes(data[one[1] : one[2]]), bytes(data[two[1] : two[2]])
    data[two[1] : two[2]] = first
    data[one[1] : one[2]] = second
    return f"{one[0]} and {two[0]}"


def _splice(data: bytearray, rng: Random, round_: Round) -> str:
    assert round_.world.other is not None
    other = round_.world.other.path.read_bytes()
    name, start, end = _place(rng, round_)
    at = rng.choice((start, rng.randrange(start, end)))
    if rng.random() < 0.5:
        data[at:] = other[at:]
    else:
        data[:at] = other[:at]
    return f"two bundles at {at}, in {name}"


def _member(data: bytearray, rng: Random, round_: Round) -> str:
    """Put a member of another bundle in the place of one of this."""
    assert round_.world.bundle is not None
    assert round_.world.other is not None
    mine, others = (regions(one.path) for one in (round_.world.bundle, round_.world.other))
    name, start, end = rng.choice(mine)
    their_name, begin, stop = rng.choice(others)
    data[start:end] = round_.world.other.path.read_bytes()[begin:stop]
    return f"{name} replaced by the other bundle's {their_name}"


def _nothing(data: bytearray, rng: Random, round_: Round) -> str:
    return "the sound bundle"


_FAULTS: dict[str, Fault] = {
    "flip": _flip,
    "overwrite": _overwrite,
    "cut": _cut,
    "extend": _extend,
    "insert": _insert,
    "remove": _remove,
    "swap": _swap,
    "splice": _splice,
    "member of another": _member,
    "nothing": _nothing,
}

AREA = Area(
    name="bundles",
    promise="a bundle in which any byte has changed is refused, and leaves nothing on the node; "
    "an unchanged one gives the same bytes",
    play=play,
    rounds=1000,
    sample=20,
)
