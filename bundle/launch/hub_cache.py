"""The hub's cache that a program of an environment sees: the bundle's repositories, and the user's.

The libraries of Hugging Face look for models and data sets in one directory, ``HF_HUB_CACHE``. The
bundle's lie in the environment, which is never written to, and the user may have more in a cache of
their own. So there is a directory with a link to each repository of both, among the caches of the
node root; of two of the same name the bundle's counts, since that one was locked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping

from ..environment.listing import STATE
from .directories import JobDirectories

_OTHER_NAMES = (
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
    "PYTORCH_TRANSFORMERS_CACHE",
    "PYTORCH_PRETRAINED_BERT_CACHE",
)
"""Older variables for the same cache; transformers 4 lets them win over ``HF_HUB_CACHE``."""
_LAYOUT = "1"
"""The layout's version; transformers 4 warns where ``version.txt`` does not have it."""
_REPOSITORIES = ("models--", "datasets--", "spaces--")
HUB = "hub"
"""The directory of the bundle's repositories in an environment, below its own state."""


def variables(directories: JobDirectories, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say where the hub's cache is.

    Where the bundle has no models or data sets, a cache that the user has named stays what it is;
    without one, the user's cache at its usual place is used if it is there. Only ``HF_HOME`` moves
    to the node's disk then, for what the libraries write.
    """
    if os.path.isdir(_of_bundle(directories)):
        view = _view(directories, base)
        return dict.fromkeys(("HF_HUB_CACHE", *(n for n in _OTHER_NAMES if n in base)), view)
    if any(name in base for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")):
        return {}
    usual = _usual(base)
    return {"HF_HUB_CACHE": usual} if os.path.isdir(usual) else {}


def prepare(directories: JobDirectories, base: Mapping[str, str]) -> None:
    """Make the directory that :func:`variables` names; several tasks of a node may do so at once.

    Raises:
        OSError: it cannot be made.
    """
    own = _of_bundle(directories)
    if not os.path.isdir(own):
        return
    view = _view(directories, base)
    os.makedirs(view, mode=0o700, exist_ok=True)
    for cache in (own, *_of_user(base)):
        with contextlib.suppress(OSError):  # somebody else's, or none at all
            for name in os.listdir(cache):
                if name.startswith(_REPOSITORIES):
                    _link(os.path.join(cache, name), os.path.join(view, name))
    with open(os.path.join(view, "version.txt"), "w", encoding="ascii") as file:
        file.write(_LAYOUT)


def _view(directories: JobDirectories, base: Mapping[str, str]) -> str:
    """Return the directory of links, one for each environment and choice of the user's caches."""
    text = "\n".join([directories.environment, *_of_user(base)])
    name = hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
    return os.path.join(directories.root, "cache", HUB, name)


def _of_bundle(directories: JobDirectories) -> str:
    return os.path.join(directories.environment, STATE, HUB)


def _of_user(base: Mapping[str, str]) -> list[str]:
    """Return the caches that a user's own programs would use, by precedence."""
    named = [base[name] for name in ("HF_HUB_CACHE", *_OTHER_NAMES) if base.get(name)]
    home = base.get("HF_HOME")
    usual = os.path.join(home, "hub") if home else _usual(base)
    return [os.path.abspath(os.path.expanduser(cache)) for cache in (*named, usual)]


def _usual(base: Mapping[str, str]) -> str:
    """Return huggingface_hub's cache directory if none of its variables is set."""
    caches = base.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "huggingface", "hub")


def _link(target: str, path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.symlink(target, path)
