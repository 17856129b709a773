"""The checkpoints of the training loop: written whole or not at all, and never trusted unread.

A checkpoint is ``checkpoint_epoch_N.pt`` at the end of an epoch and ``checkpoint_step_N.pt``
within one; beside it lies a note, ``.json``, with its digest and its step. The note is written
last: a checkpoint without one is not complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import TrainerError
from ..network import dist

BEST = "best.pt"
DAMAGED = ".damaged"
"""The ending of a damaged checkpoint's note: the checkpoint is no longer used."""
_NAME = re.compile(r"checkpoint_(epoch|step)_\d+\.pt")


@dataclass(frozen=True, kw_only=True)
class Note:
    """The facts about a checkpoint that are known without loading it."""

    path: Path
    """The checkpoint."""
    step: int
    """Steps that were done."""
    sha256: str
    """Of its bytes, in hex."""


def packed(state: Mapping[str, Any]) -> bytes:
    """Return a state of tensors, numbers, texts, mappings and lists as ``torch.load`` reads it."""
    import torch

    memory = io.BytesIO()
    torch.save(dict(state), memory)
    return memory.getvalue()


def save(path: Path, data: bytes, step: int) -> None:
    """Write a checkpoint and its note; a crash at any moment leaves all of it or nothing.

    Raises:
        TrainerError: it cannot be written.
    """
    note = {"step": step, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    try:
        _note_of(path).unlink(missing_ok=True)  # of another state than what comes now
        write_whole(path, data)
        write_whole(_note_of(path), (json.dumps(note) + "\n").encode())
    except OSError as error:
        raise TrainerError(
            f"the checkpoint {path} cannot be written: {error.strerror or error}",
            hint="check the free space and the permissions there; --resume continues from the "
            "last one",
        ) from error


def complete(out: Path) -> list[Note]:
    """Return the notes of the complete checkpoints in a folder, oldest first."""
    notes = []
    for path in _checkpoints(out):
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raw = json.loads(_note_of(path).read_text(encoding="utf-8"))
            notes.append(Note(path=path, step=int(raw["step"]), sha256=str(raw["sha256"])))
    return sorted(notes, key=lambda note: (note.step, note.path.name))


def without_note(out: Path) -> set[str]:
    """Return the checkpoints whose note is missing or unreadable, by their names without an ending.

    One that was being written when its run was killed is among them.
    """
    known = {note.path for note in complete(out)}
    return {path.stem for path in _checkpoints(out) if path not in known}


def _checkpoints(out: Path) -> list[Path]:
    if not out.is_dir():
        return []
    return [path for path in out.iterdir() if _NAME.fullmatch(path.name)]


def newest(out: Path) -> tuple[Note, bytes] | None:
    """Return the newest sound checkpoint with its bytes; report damaged ones, and skip them.

    Raises:
        TrainerError: there are checkpoints, and none is sound.
    """
    for note in reversed(complete(out)):
        try:
            data = note.path.read_bytes()
            if hashlib.sha256(data).hexdigest() == note.sha256:
                return note, data
            why = "is damaged"
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
        dist.say(f"warning: {note.path} {why}; the one before it is used")
        # Otherwise it would count when old checkpoints are removed, and sound ones would go first.
        with suppress(OSError):
            _note_of(note.path).replace(note.path.with_suffix(DAMAGED))
    damaged = _damaged(out)
    if damaged:
        raise TrainerError(
            f"no checkpoint in {out} can be used ({len(damaged)} damaged)",
            hint=f"rm {out}/checkpoint_* to start again there, or choose another --out",
        )
    return None


def _damaged(out: Path) -> set[str]:
    """Return the damaged checkpoints, by their names without an ending."""
    damaged = {path.stem for path in out.glob(f"checkpoint_*{DAMAGED}")}
    bare = without_note(out)
    # A single one without any note was being written when its run was killed.
    if len(bare) > 1 or any((out / f"{name}.json").exists() for name in bare):
        damaged |= bare
    return damaged


def load(data: bytes, name: str) -> dict[str, Any]:
    """Return the state in a checkpoint's bytes, without running any code in them.

    Raises:
        TrainerError: they are no checkpoint of ours.
    """
    import torch

    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if isinstance(state, dict):
            return state
        why = "it is not a mapping"
    except Exception as error:  # torch's, zip's and pickle's own: it is no checkpoint of ours
        why = str(error).strip().partition("\n")[0][:200]
    raise TrainerError(
        f"{name} cannot be loaded: {why}",
        hint="remove it, and --resume continues from the one before it",
    )


def thin_out(out: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints; the best one has a name of its own."""
    for note in complete(out)[:-keep]:
        with suppress(OSError):
            _note_of(note.path).unlink()
            note.path.unlink()


def clear(out: Path) -> None:
    """Remove every checkpoint, including the best one.

    Raises:
        OSError: one of them cannot be removed.
    """
    for path in out.iterdir():
        if _NAME.fullmatch(path.name) or path.name == BEST:
            for ending in (".json", DAMAGED):
                path.with_suffix(ending).unlink(missing_ok=True)
            path.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name always stands for all of it, on the disk, too.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()  # on a full disk it would keep the little that is left
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _note_of(path: Path) -> Path:
    return path.with_suffix(".json")
