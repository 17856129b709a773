"""Known values are taken out of an event's texts; what programs read of it stays."""

from __future__ import annotations

import pytest

from bundle.redaction.known_values import SecretMask, can_be_found

TOKEN = "SEKRITENV789abc"


@pytest.mark.parametrize(
    ("value", "worth"),
    [
        (TOKEN, True),
        ("hunter2", True),
        ("12345", False),
        ("123456", True),
        ("abc", False),
        ("aaaaaaa", False),
        ("Password", False),
        ("", False),
    ],
)
def test_what_is_can_be_found(value: str, worth: bool) -> None:
    assert can_be_found(value.encode()) is worth


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


def test_only_secrets_are_hidden() -> None:
    env = {"HF_TOKEN": TOKEN, "HOME": "/home/ada", "KEY": "abc", "SSH_KEY": "/home/ada/.ssh/id"}
    mask = SecretMask(env, ())
    event = {"text": f"{TOKEN} /home/ada abc /home/ada/.ssh/id"}
    assert mask.hide_secrets(event) == {"text": "*** /home/ada abc /home/ada/.ssh/id"}


def test_of_two_values_the_longer_one_goes_as_a_whole() -> None:
    mask = SecretMask({"A": "secret-1", "B": "secret-1-more"}, ("A", "B"))
    assert mask.hide_secrets({"text": "secret-1-more secret-1"}) == {"text": "*** ***"}


def test_a_line_of_a_long_value_is_hidden() -> None:
    line = "MIIEowIBAAKCAQEA0x9Tqk3v"
    mask = SecretMask({"PEM": f"-----BEGIN-----\n{line}\n-----END-----\n"}, ("PEM",))
    assert mask.hide_secrets({"tail": [line]}) == {"tail": ["***"]}


def test_what_programs_read_stays() -> None:
    mask = SecretMask({"MINE": "launch"}, ("MINE",))
    event = {"event": "launch", "phase": "launch", "node": "launch1", "text": "a launch"}
    assert mask.hide_secrets(event) == {**event, "text": "a ***"}


def test_without_secrets_nothing_changes() -> None:
    assert SecretMask({}, ()).hide_secrets({"text": "a"}) == {"text": "a"}
