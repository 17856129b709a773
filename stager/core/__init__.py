"""Shared by every package: errors, values, the offline root, subprocesses, digests."""
