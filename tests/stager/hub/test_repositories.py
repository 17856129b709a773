"""What of a hub may be named, and which of its files are taken."""

from __future__ import annotations

from typing import Any

import pytest

from stager.core.errors import StagerError
from stager.hub.client import select_files
from stager.hub.repositories import HubRequest, Kind, parse_request

GOOD: list[tuple[Kind, Any, HubRequest]] = [
    ("model", "bert", HubRequest(kind="model", name="bert")),
    ("model", "org/a.b-c@v1.0", HubRequest(kind="model", name="org/a.b-c", revision="v1.0")),
    ("dataset", "o/n@refs/pr/1", HubRequest(kind="dataset", name="o/n", revision="refs/pr/1")),
    ("dataset", {"name": "o/n", "config": "en", "split": "train"},
     HubRequest(kind="dataset", name="o/n", config="en", split="train")),
    ("space", "o/n", HubRequest(kind="space", name="o/n")),
    ("model", {"name": "o/n", "files": ["*"]}, HubRequest(kind="model", name="o/n", files=("*",))),
]  # fmt: skip
NAMES = (
    *("a/b/c", "/etc/passwd", "../up", "-o/n", "o/n@", "o/n@../../x", "o--p/n"),
    *("https://host/o/n", "", "o/n@a b"),
)
BAD: list[tuple[Kind, Any]] = [
    *(("model", name) for name in NAMES),
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
    assert HubRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(("kind", "value"), BAD)
def test_nonsense_is_refused(kind, value):
    with pytest.raises(ValueError, match=r"\w"):
        parse_request(kind, value)


CONFIGS: list[dict[str, Any]] = [
    {"config_name": "en", "data_dir": "en"},
    {"config_name": "de", "data_files": [
        {"split": "train", "path": ["de/train-*.parquet", "de/more/**/*.parquet"]},
        {"split": "test", "path": "de/test.parquet"},
    ]},
]  # fmt: skip
DATA = ["README.md", "en/train.csv", "en/valid.csv", "de/train-0.parquet", "de/test.parquet",
        "de/more/a/b.parquet", "stray.csv"]  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "left"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/m.onnx"],
         ["config.json", "model.safetensors"]),
        (["a/pytorch_model.bin", "b.safetensors"], ["a/pytorch_model.bin", "b.safetensors"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (["pytorch_model.bin", "adapter_model.safetensors"],
         ["adapter_model.safetensors", "pytorch_model.bin"]),
        (["pytorch_model.fp16.bin", "pytorch_model.bin", "model.fp16.safetensors"],
         ["model.fp16.safetensors", "pytorch_model.bin"]),
        (["a/pytorch_model-00001-of-00002.bin", "a/pytorch_model.bin.index.json",
          "a/model.safetensors.index.json", "a/model-00001-of-00001.safetensors"],
         ["a/model-00001-of-00001.safetensors", "a/model.safetensors.index.json"]),
        (["training_args.bin", "optimizer.pt", "model.onnx"],
         ["model.onnx", "optimizer.pt", "training_args.bin"]),
        (["model.onnx", "config.json"], ["config.json", "model.onnx"]),
    ],
)  # fmt: skip
def test_of_a_model_what_pytorch_reads(paths, left):
    assert select_files(HubRequest(kind="model", name="m"), paths, []) == left


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        ("", "", sorted(DATA)),
        ("en", "", ["README.md", "en/train.csv", "en/valid.csv"]),
        ("en", "validation", ["README.md", "en/valid.csv"]),
        ("de", "train", ["README.md", "de/more/a/b.parquet", "de/train-0.parquet"]),
        ("", "test", ["README.md", "de/test.parquet"]),
    ],
)
def test_a_part_of_a_data_set(config, split, expected):
    request = HubRequest(kind="dataset", name="d", config=config, split=split)
    assert select_files(request, DATA, CONFIGS) == expected


@pytest.mark.parametrize(
    ("split", "paths", "expected"),
    [
        ("train", ["train-00.csv", "constrained.csv", "test.csv"], ["train-00.csv"]),
        ("train", ["data.csv", "more.csv"], ["data.csv", "more.csv"]),
        ("tiny", [f"data/{one}-00000-of-00001.parquet" for one in ("big", "tiny")],
         ["data/tiny-00000-of-00001.parquet"]),
        ("test", ["my-eval/a.csv", "train/b.csv"], ["my-eval/a.csv"]),
    ],
)  # fmt: skip
def test_without_a_card_the_names_of_files_say_the_split(split, paths, expected):
    assert select_files(HubRequest(kind="dataset", name="d", split=split), paths, []) == expected


def test_a_configuration_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(StagerError) as caught:
        select_files(HubRequest(kind="dataset", name="d", config="fr"), DATA, CONFIGS)
    assert caught.value.context == ("it has en", "it has de")
