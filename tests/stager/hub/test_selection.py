from typing import Any

import pytest

from stager.core.errors import StagerError
from stager.hub.client import selected
from stager.hub.repositories import HubRequest

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
    assert selected(HubRequest(kind="model", name="m"), paths, []) == left


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
    assert selected(request, DATA, CONFIGS) == expected


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
    assert selected(HubRequest(kind="dataset", name="d", split=split), paths, []) == expected


def test_a_configuration_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(StagerError) as caught:
        selected(HubRequest(kind="dataset", name="d", config="fr"), DATA, CONFIGS)
    assert caught.value.context == ("it has en", "it has de")
