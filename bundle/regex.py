"""Regular expressions that are compiled when they are first used.

A command imports 350 before its job starts and uses a few dozen; to compile all of them took a
quarter of that time. For modules that have several.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    compile_lazily = re.compile
else:

    class compile_lazily:
        """Return a pattern as ``re.compile`` does; a wrong one is an error when it is used."""

        def __init__(self, pattern: str | bytes, flags: int = 0) -> None:
            self.pattern, self._flags = pattern, flags

        def __getattr__(self, name: str) -> object:
            value = getattr(re.compile(self.pattern, self._flags), name)
            setattr(self, name, value)  # from now on as quick as a pattern's
            return value
