"""Locks in tests: what they hold, and how one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stager.core.errors import ResolveError
from stager.lock.pylock import Lock

BOTH = pytest.mark.parametrize(
    "resolver", ["uv", pytest.param("pip-tools", marks=pytest.mark.full)]
)
UV_FIRST = BOTH  # where pip-tools, which takes ten times as long, has much the same test beside


def versions(lock: Lock) -> dict[str, str]:
    return {str(file.name): str(file.version) for file in lock.files}


def fails(lock: Callable[..., Lock], *args: Any, **more: Any) -> ResolveError:
    with pytest.raises(ResolveError) as caught:
        lock(*args, **more)
    assert "Traceback" not in "".join(caught.value.context)
    return caught.value
