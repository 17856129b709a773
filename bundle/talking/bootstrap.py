"""What runs first on a node of an allocation: it starts the far side without leaving a file.

Its source is sent as the text of ``python3 -I -S -c``; so it stands alone. On standard input come
a line with two numbers of bytes, then the modules of the node program, compressed, then the
request, compressed, in JSON with a ``common`` part and an ``own`` part for nodes that differ. Both
are kept in memory, the program as a zip. It goes on in this process, or under the Python that the
request names for this node; standard input stays open behind them.
"""

import importlib
import itertools
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable


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


def decompressed(data: bytes) -> bytes:
    """Undo the compression; that of a driver's Python without bz2 is zlib's."""
    if not data.startswith(b"BZh"):
        return zlib.decompress(data)
    try:
        from _bz2 import BZ2Decompressor
    except ImportError:
        return bunzipped(data)
    return BZ2Decompressor().decompress(data)


def bunzipped(data: bytes) -> bytes:
    """Undo bzip2 under a Python that was built without it; takes half a second for a program."""
    read, out = reader(data[4:]), []
    while read(48) == 0x314159265359:
        read(33)  # a checksum, and a bit that has had no use for long
        origin, used = read(24), read(16)
        symbols = []
        for high in range(16):
            word = read(16) if used >> 15 - high & 1 else 0
            symbols += [16 * high + low for low in range(16) if word >> 15 - low & 1]
        block = characters(read, symbols)
        following = sorted(range(len(block)), key=block.__getitem__)  # Burrows and Wheeler's
        at, text = following[origin], bytearray()
        for _ in block:
            text.append(block[at])
            at = following[at]
        # Behind four that are the same comes how many more there are.
        out.append(re.sub(rb"(?s)(.)\1{3}(.)", lambda found: found[1] * (4 + found[2][0]), text))
    return b"".join(out)


def reader(data: bytes) -> Callable[[int], int]:
    """What takes so many bits of the data."""
    held = left = at = 0

    def read(count: int) -> int:
        nonlocal held, left, at
        while left < count:
            held, left, at = held << 8 | data[at], left + 8, at + 1
        left -= count
        taken = held >> left
        held -= taken << left
        return taken

    return read


def characters(read: Callable[[int], int], symbols: list[int]) -> bytearray:
    """The characters of one block: Huffman's codes, runs, and what was moved to the front."""
    groups, parts = list(range(read(3))), read(15)
    order = groups[:]
    chosen = [to_front(order, count_ones(read)) for _ in range(parts)]
    tables = [huffman(read, len(symbols) + 2) for _ in groups]
    block, run, weight = bytearray(), 0, 1
    for number in itertools.count():
        table, code = tables[chosen[number // 50]], 1
        while code not in table:
            code = code << 1 | read(1)
        symbol = table[code]
        if symbol < 2:
            run, weight = run + (weight << symbol), weight << 1
            continue
        block += bytes([symbols[0]]) * run
        run, weight = 0, 1
        if symbol > len(symbols):
            return block
        block.append(to_front(symbols, symbol - 1))
    return block


def to_front(order: list[int], at: int) -> int:
    """Move one to the front, and give it."""
    order.insert(0, order.pop(at))
    return order[0]


def count_ones(read: Callable[[int], int]) -> int:
    """How many ones come before the next zero."""
    return next(count for count in itertools.count() if not read(1))


def huffman(read: Callable[[int], int], symbols: int) -> dict[int, int]:
    """Which symbol each code stands for; a one is put before a code, to keep its length."""
    length, lengths = read(5), []
    for _ in range(symbols):
        while read(1):
            length += 1 - 2 * read(1)
        lengths.append(length)
    code, table = 1, {}
    for length in range(1, 21):
        code <<= 1
        for symbol in range(symbols):
            if lengths[symbol] == length:
                table[code] = symbol
                code += 1
    return table


def zipped(modules: bytes) -> bytes:
    """The modules behind a line of their names and sizes, as a zip that Python imports from."""
    at = modules.index(b"\n") + 1
    body, index, start = [], [], 0
    for name, size in json.loads(modules[:at]):
        path, data, at = name.encode(), modules[at : at + size], at + size
        facts = struct.pack("<5H3I2H", 10, 0, 0, 0, 33, zlib.crc32(data), size, size, len(path), 0)
        body += [b"PK\3\4", facts, path, data]
        index.append(b"PK\1\2\n\0" + facts + struct.pack("<3H2I", 0, 0, 0, 0, start) + path)
        start += 30 + len(path) + size
    count, length = len(index), sum(map(len, index))
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, length, start, 0)
    return b"".join([*body, *index, end])


def in_memory(data: bytes) -> int:
    """An open file that holds the data, has no name, and is inherited."""
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
    """Read, and become the agent; returns its exit status."""
    line = b""
    while not line.endswith(b"\n"):
        line += take(1)
    sizes = [int(word) for word in line.split()]
    program = zipped(decompressed(take(sizes[0])))
    request = zlib.decompress(take(sizes[1]))
    asked = json.loads(request)
    own = {**asked["common"], **asked["own"].get(os.environ["SLURMD_NODENAME"], {})}
    python = own.get("python") or sys.executable
    path = f"/proc/self/fd/{in_memory(program)}"
    argv = [*sys.argv[1:], "--request", str(in_memory(request))]
    if python != sys.executable:
        os.execv(python, [python, "-I", "-S", path, *argv])
    # Another start of the same Python would take as long as a fifth of all that follows.
    sys.argv[:] = [path, *argv]
    sys.path.insert(0, path)
    status: int = importlib.import_module("bundle.agent").command(argv)
    return status


if __name__ == "__main__":
    sys.exit(main())
