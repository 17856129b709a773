"""Values that are known to be secret, taken out of whatever is kept of a job's events."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from .secrets import HIDDEN, is_secret

_MIN_LENGTH = 5
_MIN_DIFFERENT = 3
_MIN_DIGITS = 6
"""A number of fewer digits is too common."""
_MIN_LINE = 24
"""Characters of one line of a long value that tell by themselves."""
_ORDINARY = frozenset(
    (
        *("true", "false", "none", "null", "empty", "enabled", "disabled", "required", "default"),
        *("basic", "bearer", "digest", "kerberos", "munge", "token", "password", "secret"),
        *("admin", "root", "user", "test", "local", "changeme"),
    )
)
_STRUCTURE = frozenset(
    (
        *("event", "phase", "node", "nodes", "stopped", "log_dir", "code", "how", "ended_by"),
        *("backend", "interface"),
    )
)
"""Keys of events whose values are read by programs; none is a text that a rank wrote."""


def worth_hiding(value: str) -> bool:
    """Return whether a value can be looked for without finding half of the text."""
    bare = value.strip()
    if len(bare) < _MIN_LENGTH or bare.lower() in _ORDINARY:
        return False
    if bare.isdigit() and len(bare) < _MIN_DIGITS:
        return False
    return len(set(bare)) >= _MIN_DIFFERENT


class SecretMask:
    """Hides the secrets of an environment in JSON values."""

    def __init__(self, env: Mapping[str, str], passed: Collection[str]) -> None:
        """Take the values of variables with secret names, and of those the user declares secret."""
        values = {value for name in env for value in _secrets(name, env[name], passed)}
        longest_first = sorted(filter(worth_hiding, values), key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first)))
        self._any = bool(longest_first)

    def without_secrets(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return a JSON object with the secrets in its texts hidden."""
        if not self._any:
            return dict(fields)
        return {
            key: value if key in _STRUCTURE else self._hidden(value)
            for key, value in fields.items()
        }

    def _hidden(self, value: object) -> object:
        if isinstance(value, str):
            return self._values.sub(HIDDEN, value)
        if isinstance(value, Mapping):
            return self.without_secrets(value)
        if isinstance(value, (list, tuple)):
            return [self._hidden(item) for item in value]
        return value


def _secrets(name: str, value: str, passed: Collection[str]) -> Iterator[str]:
    """Yield a secret's value and long lines; a name that only sounds secret may be a path."""
    if name not in passed and (not is_secret(name) or value.startswith(("/", "~"))):
        return
    yield value.strip()
    for line in value.splitlines():
        if len(line.strip()) >= _MIN_LINE:
            yield line.strip()
