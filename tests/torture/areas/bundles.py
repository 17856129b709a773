"""Altered bundles: flipped, cut, extended, their members swapped, two of them spliced.

A bundle in which any byte has changed is refused, and leaves nothing on the node; an unchanged one
gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.format.manifest import BLOCK, count_padding
from bundle.protocol.problem import NodeError
from stager.pack.bundle import Packed

from ..checks import nothing_half_written
from ..damage import change_bytes
from ..product import refused, sound, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require
from ..world import VERIFY, tree_of, unpack_below

_COMMANDS = 25  # of so many rounds one goes through the command line


def play(round_: Round) -> str:
    real = round_.world.bundle
    data = bytearray(real.path.read_bytes())
    round_.strike(_FAULTS, data, round_)
    path = round_.folder / real.path.name
    path.write_bytes(data)
    same = bytes(data) == real.path.read_bytes()
    if round_.number % _COMMANDS == _COMMANDS - 1:
        return _by_command(round_, path, same=same)
    try:
        made = unpack_below(
            round_.nodes, path, real.manifest.id, processes=round_.rng.choice((1, 1, 2))
        )
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
    argv = round_.rng.choice(
        (
            ("exec", "--bundle", str(path), "--", "python", "-c", "import alpha"),
            (*VERIFY, "--bundle", str(path)),
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


# --- what is done to a bundle --------------------------------------------------------------------

Region = tuple[str, int, int]  # a part of a bundle's bytes: its name, start and end


def _regions(packed: Packed) -> list[Region]:
    with BundleFile(str(packed.path)) as bundle:
        found = []
        end = 0
        for name, size in bundle.manifest.members():
            start = bundle.offset(name)
            found += [(f"header of {name}", start - BLOCK, start), (name, start, start + size)]
            end = start + size + count_padding(size)
            if count_padding(size):
                found.append((f"padding of {name}", start + size, end))
    return [*found, ("end", end, packed.path.stat().st_size)]


def _place(round_: Round) -> Region:
    return round_.rng.choice([part for part in _regions(round_.world.bundle) if part[2] > part[1]])


def _altered(data: bytearray, round_: Round) -> str:
    name, start, end = _place(round_)
    return f"{change_bytes(data, round_.rng, start, end)}, in {name}"


def _swapped(data: bytearray, round_: Round) -> str:
    two = round_.rng.sample(_regions(round_.world.bundle), 2)
    (first, start, end), (second, begin, stop) = sorted(two, key=lambda part: part[1])
    data[start:stop] = data[begin:stop] + data[end:begin] + data[start:end]
    return f"{first} and {second}"


def _spliced_with_another(data: bytearray, round_: Round) -> str:
    other = round_.world.other.path.read_bytes()
    name, start, end = _place(round_)
    at = round_.rng.choice((start, round_.rng.randrange(start, end)))
    if round_.rng.random() < 0.5:
        data[at:] = other[at:]
    else:
        data[:at] = other[:at]
    return f"at {at}, in {name}"


def _member_of_another(data: bytearray, round_: Round) -> str:
    name, start, end = round_.rng.choice(_regions(round_.world.bundle))
    theirs, begin, stop = round_.rng.choice(_regions(round_.world.other))
    data[start:end] = round_.world.other.path.read_bytes()[begin:stop]
    return f"{name} replaced by the other bundle's {theirs}"


def _nothing(data: bytearray, round_: Round) -> None:
    pass


_FAULTS = (*[_altered] * 6, _swapped, _spliced_with_another, _member_of_another, _nothing)

AREA = Area(play, rounds=1000, sample=4)
