"""The words of ssh for a login that failed, those of jump hosts among them."""

from __future__ import annotations

import pytest

from bundle.driver.transports.ssh_fanout import reason, telling_line
from bundle.protocol.problem import ProblemCode

CLOSED = "kex_exchange_identification: Connection closed by remote host"
BEHIND = (CLOSED, "Connection closed by UNKNOWN port 65535")
"""What ssh says when its jump host cannot go on, whatever the reason."""


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        (
            (CLOSED, "Connection closed by 10.0.0.7 port 22"),
            ProblemCode.SSH_TURNED_AWAY,
            "Connection closed by 10.0.0.7 port 22",
        ),
        (
            ("kex_exchange_identification: read: Connection reset by peer",),
            ProblemCode.SSH_TURNED_AWAY,
            "kex_exchange_identification: read: Connection reset by peer",
        ),
        (
            ("Connection reset by 10.0.0.7 port 22", *BEHIND),
            ProblemCode.SSH_TURNED_AWAY,
            "Connection reset by 10.0.0.7 port 22",
        ),
        (
            ("ann@jump: Permission denied (publickey).", *BEHIND),
            ProblemCode.SSH_NO_LOGIN,
            "ann@jump: Permission denied (publickey)",
        ),
        (
            ("channel 0: open failed: connect failed: No route to host", *BEHIND),
            ProblemCode.SSH_UNREACHED,
            "channel 0: open failed: connect failed: No route to host",
        ),
        (
            (
                "Connection timed out during banner exchange",
                "Connection to 10.0.0.7 port 22 timed out",
            ),
            ProblemCode.SSH_UNREACHED,
            "Connection timed out during banner exchange",
        ),
        (("This account is currently not available.",), None, ""),
    ],
)
def test_why_a_login_failed(said: tuple[str, ...], code: ProblemCode | None, line: str) -> None:
    assert (reason(said), telling_line(said)) == (code, line)
