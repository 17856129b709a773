"""``python -m tests.torture``: inject faults into the real product, hold it to its promises."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# The tests' own helpers, and the product before tests/bundle, which bears the same name.
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

if __name__ == "__main__":
    from torture.command import main

    sys.exit(main(sys.argv[1:]))
