"""What a driver has printed, in tests that are its main thread."""

from __future__ import annotations

import json

import pytest

from bundle.driver.state import State


def displayed(state: State, capfd: pytest.CaptureFixture[str]) -> str:
    assert state.display.drain(60)
    return capfd.readouterr().out


def noted(state: State, capfd: pytest.CaptureFixture[str]) -> str:
    events = map(json.loads, displayed(state, capfd).splitlines())
    return "\n".join(event["text"] for event in events if event["event"] == "note")
