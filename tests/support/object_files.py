"""Object files as small as they can be."""

ELF = b"\x7fELF\x02\x01".ljust(40, b"\0") + (64).to_bytes(8, "little") + bytes(16)
