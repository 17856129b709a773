"""``python -m tests.torture``: inject faults into the real product, hold it to its promises."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tests.torture.command import main

    sys.exit(main(sys.argv[1:]))
