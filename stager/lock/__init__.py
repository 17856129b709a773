"""From requirements to exact wheels with hashes: ``pylock.toml`` (PEP 751)."""
