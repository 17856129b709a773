"""From requirements to exact files: uv, pip-tools, pip's configuration, the lock as a value."""
