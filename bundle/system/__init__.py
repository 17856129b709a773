"""The operating system: processes, signals, files, permissions, network, host lists."""
