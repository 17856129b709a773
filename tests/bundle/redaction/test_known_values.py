"""Known values are taken out of an event's texts; what programs read of it stays."""

from __future__ import annotations

import pytest

from bundle.redaction.known_values import SecretMask

TOKEN = "SEKRITENV789abc"


def test_texts_lose_the_secret_at_any_depth() -> None:
    event = {
        "event": "launch",
        "ok": False,
        "tail": [f"token: {TOKEN}", "plain"],
        "failures": [{"node": "n1", "rank": 1, "message": f"<{TOKEN}>", "lines": (f"{TOKEN}",)}],
        "sent": {"0": 12},
    }
    mask = SecretMask({"MINE": TOKEN}, ("MINE",))
    assert mask.hide_secrets(event) == {
        "event": "launch",
        "ok": False,
        "tail": ["token: ***", "plain"],
        "failures": [{"node": "n1", "rank": 1, "message": "<***>", "lines": ["***"]}],
        "sent": {"0": 12},
    }


LINE = "MIIEowIBAAKCAQEA0x9Tqk3v"


@pytest.mark.parametrize(
    ("env", "named", "text", "hidden"),
    [
        (
            {"HF_TOKEN": TOKEN, "HOME": "/home/ada", "KEY": "abc", "SSH_KEY": "/home/ada/.ssh/id"},
            (),
            f"{TOKEN} /home/ada abc /home/ada/.ssh/id",
            "*** /home/ada abc /home/ada/.ssh/id",
        ),
        (  # what is common is not looked for
            {"A": "12345", "B": "aaaaaaa", "C": "Password", "D": "123456"},
            ("A", "B", "C", "D"),
            "12345 aaaaaaa Password, 123456",
            "12345 aaaaaaa Password, ***",
        ),
        ({"A": "secret-1", "B": "secret-1-more"}, ("A", "B"), "secret-1-more secret-1", "*** ***"),
        ({"PEM": f"-----BEGIN-----\n{LINE}\n-----END-----\n"}, ("PEM",), LINE, "***"),
        ({"MINE": "launch"}, ("MINE",), "a launch", "a ***"),
        ({}, (), "a", "a"),
    ],
)
def test_only_secrets_are_hidden_and_what_programs_read_stays(
    env: dict[str, str], named: tuple[str, ...], text: str, hidden: str
) -> None:
    event = {"event": "launch", "phase": "launch", "node": "launch1", "text": text}
    assert SecretMask(env, named).hide_secrets(event) == {**event, "text": hidden}
