"""The one boundary: arguments in, exit code out."""

from __future__ import annotations

import gc
import sys

# Half of what a command does before its work begins is to import, and what it imports stays.
gc.set_threshold(100_000, *gc.get_threshold()[1:])

from .cli import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
