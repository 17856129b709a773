"""What runs first on a node of an allocation: it starts the far side without leaving a file.

Its source is sent as the text of ``python3 -I -S -c``; so it stands alone. On standard input come
a line with two numbers of bytes, then the node program, compressed, then the request, in JSON with
a ``common`` part and an ``own`` part for nodes that differ. Both are kept in memory, and the Python
that the request names for this node is started with the program; standard input stays open behind
them.
"""

import json
import os
import sys
import tempfile
import zlib


def take(count: int) -> bytes:
    """Exactly so many bytes from standard input, and not one more."""
    parts = []
    while count:
        data = os.read(0, min(count, 1 << 20))
        if not data:
            raise EOFError("whoever asked has gone")
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def in_memory(data: bytes) -> int:
    """An open file that holds the data, has no name, and is inherited."""
    try:
        handle = os.memfd_create("stager", 0)
    except OSError:  # forbidden by the vm.memfd_noexec setting
        with tempfile.TemporaryFile() as nameless:
            handle = os.dup(nameless.fileno())
    os.set_inheritable(handle, True)
    while data:
        data = data[os.write(handle, data) :]
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def main() -> None:
    """Read, and become the agent."""
    line = b""
    while not line.endswith(b"\n"):
        line += take(1)
    sizes = [int(word) for word in line.split()]
    program, request = zlib.decompress(take(sizes[0])), take(sizes[1])
    asked = json.loads(request)
    own = {**asked["common"], **asked["own"].get(os.environ["SLURMD_NODENAME"], {})}
    python = own.get("python") or sys.executable
    started = [python, "-I", "-S", f"/proc/self/fd/{in_memory(program)}"]
    os.execv(python, [*started, "agent", sys.argv[1], "--request", str(in_memory(request))])


if __name__ == "__main__":
    main()
