"""The first program on a node of an allocation: it starts the far side without leaving a file.

Its source is the text of ``python3 -I -S -c``. On standard input come a line with three numbers of
bytes, then, compressed, the modules of the node program (in variables where the number is 0), the
request in JSON with a ``common`` part and an ``own`` part for nodes that differ, and variables
where this process does not inherit them. It goes on under the Python that the request names.
"""

import binascii
import importlib
import json
import os
import struct
import sys
import zlib


def read_exactly(count: int) -> bytes:
    """Read exactly ``count`` bytes from standard input."""
    parts = []
    while count:
        data = os.read(0, min(count, 1 << 20))
        if not data:
            raise EOFError("the driver has gone")
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def take_carried_program() -> bytes:
    """Return the program that is in variables, and remove these: ranks are to inherit the rest."""
    names = sorted(name for name in os.environ if name.startswith("STAGER_PROGRAM_"))
    return binascii.a2b_base64("".join([os.environ.pop(name) for name in names]))


def make_zip(modules: bytes) -> bytes:
    """Return modules as a zip that Python imports from; a line has their names and sizes."""
    at = modules.index(b"\n") + 1
    body, index, start = [], [], 0
    for name, size in json.loads(modules[:at]):
        path, data = name.encode(), modules[at : at + size]
        at += size
        facts = struct.pack("<5H3I2H", 10, 0, 0, 0, 33, zlib.crc32(data), size, size, len(path), 0)
        body += [b"PK\3\4", facts, path, data]
        index.append(b"PK\1\2\n\0" + facts + struct.pack("<3H2I", 0, 0, 0, 0, start) + path)
        start += 30 + len(path) + size
    count, length = len(index), sum(map(len, index))
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, length, start, 0)
    return b"".join([*body, *index, end])


def make_memory_file(data: bytes) -> int:
    """Return an open file that holds the data, has no name, and is inherited."""
    try:
        handle = os.memfd_create("stager", 0)
    except OSError:  # forbidden by the vm.memfd_noexec setting
        import tempfile

        with tempfile.TemporaryFile() as nameless:
            handle = os.dup(nameless.fileno())
    os.set_inheritable(handle, True)
    while data:
        data = data[os.write(handle, data) :]
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def main() -> int:
    """Read program and request, and become the agent; return its exit status."""
    line = b""
    while not line.endswith(b"\n"):
        line += read_exactly(1)
    sizes = [int(word) for word in line.split()]
    program = make_zip(zlib.decompress(read_exactly(sizes[0]) or take_carried_program()))
    request = zlib.decompress(read_exactly(sizes[1]))
    if sizes[2]:
        for name, value in json.loads(zlib.decompress(read_exactly(sizes[2]))).items():
            os.environ.setdefault(name, value)
    message = json.loads(request)
    node = os.environ.get("STAGER_NODE") or os.environ["SLURMD_NODENAME"]
    own = {**message["common"], **message["own"].get(node, {})}
    python = own.get("python") or sys.executable
    path = f"/proc/self/fd/{make_memory_file(program)}"
    argv = [*sys.argv[1:], "--request", str(make_memory_file(request))]
    # Names in a bundle are UTF-8, also where the locale has another encoding (PEP 540).
    if python != sys.executable or sys.getfilesystemencoding() != "utf-8":
        os.execv(python, [python, "-I", "-S", "-X", "utf8", path, *argv])
    # Another start of the same Python would take as long as a fifth of all that follows.
    sys.argv[:] = [path, *argv]
    sys.path.insert(0, path)
    status: int = importlib.import_module("bundle.agent.agent").command(argv)
    return status


if __name__ == "__main__":
    sys.exit(main())
