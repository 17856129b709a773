from typing import Any

import pytest

from stager.hub.repositories import HubRequest, Kind, parse_request, request_from

GOOD: list[tuple[Kind, Any, HubRequest]] = [
    ("model", "bert", HubRequest(kind="model", name="bert")),
    ("model", "org/a.b-c@v1.0", HubRequest(kind="model", name="org/a.b-c", revision="v1.0")),
    ("dataset", "o/n@refs/pr/1", HubRequest(kind="dataset", name="o/n", revision="refs/pr/1")),
    ("dataset", {"name": "o/n", "config": "en", "split": "train"},
     HubRequest(kind="dataset", name="o/n", config="en", split="train")),
    ("space", "o/n", HubRequest(kind="space", name="o/n")),
    ("model", {"name": "o/n", "files": ["*"]}, HubRequest(kind="model", name="o/n", files=("*",))),
]  # fmt: skip
BAD: list[tuple[Kind, Any]] = [
    ("model", ""),
    ("model", "a/b/c"),
    ("model", "/etc/passwd"),
    ("model", "../up"),
    ("model", "-o/n"),
    ("model", "o/n@"),
    ("model", "o/n@../../x"),
    ("model", "o/n@a b"),
    ("model", "o--p/n"),
    ("model", "https://host/o/n"),
    ("model", {"name": "o/n", "split": "train"}),
    ("model", {"revision": "v1"}),
    ("dataset", {"name": "o/n", "split": 3}),
    ("dataset", {"name": "o/n", "files": "*"}),
    ("dataset", {"name": "o/n", "files": ["*"], "split": "train"}),
    ("dataset", ["o/n"]),
]


@pytest.mark.parametrize(("kind", "value", "expected"), GOOD)
def test_what_may_be_named(kind, value, expected):
    request = parse_request(kind, value)
    assert request == expected
    assert request_from(request.to_dict()) == request


@pytest.mark.parametrize(("kind", "value"), BAD)
def test_nonsense_is_refused(kind, value):
    with pytest.raises(ValueError, match=r"\w"):
        parse_request(kind, value)
