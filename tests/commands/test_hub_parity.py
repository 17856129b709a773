"""Repositories of many shapes: what real libraries read online, they read from the bundle's cache.

What is asked is evaluated in two processes, one with a hub and one with what the layers hold. The
answers are equal, or the second names what is missing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bundle.environment.listing import STATE
from bundle.launch.program_variables import HUB
from stager.building.layer_sources import make_hub_sources
from stager.core.store import Store
from stager.core.values import Target
from stager.hub.client import HubFiles, resolve
from stager.hub.repositories import Kind, parse_request
from tests.support.hub_server import HubServer, Repository, serve_hub
from tests.support.processes import run

PACKAGE = Path(__file__).resolve().parents[2] / "bundle" / "environment"
ASK = """
import _stager_patches, json, sys
_stager_patches.activate()
from datasets import load_dataset as load
from datasets import get_dataset_config_names as configs
from transformers import AutoConfig, AutoModel, AutoTokenizer, AutoProcessor
from huggingface_hub import hf_hub_download
def rows(data):
    if isinstance(data, dict):
        return {split: rows(part) for split, part in data.items()}
    return [list(row.values()) for row in data]
def norm(name):
    model = AutoModel.from_pretrained(name)
    return float(sum(one.abs().sum() for one in model.parameters()))
answers = {}
for call in json.load(sys.stdin):
    try:
        answers[call] = eval(call)
    except Exception as error:
        answers[call] = f"ERROR {type(error).__name__}: {error}"
print("ANSWERS", json.dumps(answers, default=str))
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A repository, what is taken of it, and what is asked for by the name ``N``."""

    kind: Kind = "dataset"
    files: dict[str, bytes]
    configs: Any = None
    entry: dict[str, Any] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    """Calls that answer as they do online, also with the kind of error."""
    missing: dict[str, str] = field(default_factory=dict)
    """Calls that fail, with what the message names."""


def text(word: str) -> bytes:
    return f"{word} one\n{word} two\n".encode()


def split(name: str, path: Any) -> dict[str, Any]:
    return {"split": name, "path": path}


BERT = json.dumps(
    {"model_type": "bert", "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
     "intermediate_size": 2, "vocab_size": 3, "max_position_embeddings": 4}
).encode()  # fmt: skip
TOKENIZER = json.dumps(
    {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
     "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
     "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}}
).encode()  # fmt: skip
WORDS = "float(AutoModel.from_pretrained('N').embeddings.word_embeddings.weight.sum())"
IDS = "AutoTokenizer.from_pretrained('N')('a b')['input_ids']"
TWO = {"en/a.txt": text("en"), "de/a.txt": text("de")}
TWO_CONFIGS = [
    {"config_name": "default", "data_files": "en/*.txt"},
    {"config_name": "de", "data_files": "de/*.txt"},
]
SPLITS = {"train.txt": text("a"), "test.txt": text("b")}
SHAPES = {
    "plain": Shape(files=SPLITS, same=("rows(load('N'))", "rows(load('N', split='test'))")),
    "shards": Shape(
        files={"data/tiny-00000-of-00001.txt": text("t"), "data/big-00000-of-00001.txt": text("b")},
        entry={"split": "tiny"},
        same=("rows(load('N', split='tiny'))",),
        missing={"rows(load('N'))": "data/big-00000", "load('N', split='big')": "big"},
    ),
    "part-of-shards": Shape(
        files={f"data/train-0000{n}-of-00002.txt": text(str(n)) for n in range(2)},
        entry={"files": ["data/train-00000*"]},
        missing={"load('N')": "data/train-00001", "load('N', split='train')": "data/train-00001"},
    ),
    "other-config": Shape(
        files=TWO, configs=TWO_CONFIGS, entry={"config": "de"},
        same=("rows(load('N', 'de'))", "sorted(configs('N'))"),
        missing={"load('N')": "en/a.txt", "load('N', 'default')": "en/a.txt"},
    ),
    "no-default": Shape(
        files=TWO, entry={"config": "de"},
        configs=[{"config_name": "en", "data_dir": "en"}, {"config_name": "de", "data_dir": "de"}],
        same=("rows(load('N', 'de'))", "load('N')"),
        missing={"load('N', 'en')": "en/a.txt"},
    ),
    "ranges": Shape(
        files={f"part-{n}.txt": text(str(n)) for n in range(3)}, entry={"split": "train"},
        configs=[{"config_name": "default", "data_files": [
            split("train", "part-[01].txt"), split("test", "part-[!01].txt")]}],
        same=("rows(load('N', split='train'))",), missing={"rows(load('N'))": "part-2.txt"},
    ),
    "script": Shape(files={"script.py": b"#", **SPLITS}, missing={"load('N')": "script.py"}),
    "named-files": Shape(
        files=SPLITS, entry={"files": ["train.txt"]},
        same=("rows(load('N', data_files='train.txt'))",
              "rows(load('N', data_files={'a': ['train.*']}))"),
        missing={"load('N', data_files='*.txt')": "test.txt", "load('N')": "test.txt"},
    ),
    "a-folder": Shape(
        files=TWO, entry={"files": ["en/*"]},
        same=("rows(load('N', data_dir='en'))",),
        missing={"load('N', data_dir='de')": "de/a.txt"},
    ),
    "pickled-beside-an-adapter": Shape(
        kind="model", same=(WORDS,),
        files={"config.json": BERT, "pytorch_model.bin": b"", "adapter_model.safetensors": b""},
    ),
    "both-weights": Shape(
        kind="model", same=(WORDS,),
        files={"config.json": BERT, "pytorch_model.bin": b"", "model.safetensors": b""},
        missing={"hf_hub_download('N', 'pytorch_model.bin')": "pytorch_model.bin"},
    ),
    "tokenizer-and-config": Shape(
        kind="model", same=(IDS, IDS.replace("Tokenizer", "Processor")),
        files={"config.json": BERT, "tokenizer.json": TOKENIZER},
    ),
    "tokenizer-left-out": Shape(
        kind="model", same=(WORDS,), entry={"files": ["config.json", "*.safetensors"]},
        missing={IDS: "tokenizer.json", IDS.replace("Tokenizer", "Processor"): ""},
        files={"config.json": BERT, "tokenizer.json": TOKENIZER, "model.safetensors": b""},
    ),
    "config-left-out": Shape(
        kind="model", entry={"files": ["*.safetensors"]}, missing={WORDS: "config.json"},
        files={"config.json": BERT, "model.safetensors": b""},
    ),
    "weights-left-out": Shape(
        kind="model", entry={"files": ["*.json"]}, missing={WORDS: "model.safetensors"},
        files={"config.json": BERT, "model.safetensors": b"", "pytorch_model.bin": b""},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What each call answered online, and offline."""
    for library in ("datasets", "transformers", "huggingface_hub"):
        pytest.importorskip(library)
    top = tmp_path_factory.mktemp("parity")
    repositories = [_repository(name, shape) for name, shape in SHAPES.items()]
    with (
        pytest.MonkeyPatch.context() as patch,
        serve_hub(HubServer(repositories=repositories)) as hub,
    ):
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(top / "none"))
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        _fill(top / "cache", Store(top / "store"))
        online = _ask(top, "online")
        patch.delenv("HF_ENDPOINT")
        patch.setenv("HF_HUB_CACHE", str(top / "cache"))
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        offline = _ask(top, "offline")
    return {call: (online[call], offline[call]) for call in online}


def _repository(name: str, shape: Shape) -> Repository:
    weights = _weights()
    files = {path: data or weights[path] for path, data in shape.files.items()}
    card = {"configs": shape.configs} if shape.configs else {}
    if shape.kind == "dataset":
        files["README.md"] = f"---\n{json.dumps(card)}\n---\n".encode()  # JSON is YAML
    return Repository(name=f"org/{name}", kind=shape.kind, files=files, card=card)


@cache
def _weights() -> dict[str, bytes]:
    """The words of a model, in the formats that PyTorch reads."""
    import torch
    from safetensors.torch import save

    tensors = {"embeddings.word_embeddings.weight": torch.ones(3, 2)}
    pickled = io.BytesIO()
    torch.save(tensors, pickled)
    safe = save(tensors, metadata={"format": "pt"})
    return {"pytorch_model.bin": pickled.getvalue(), "model.safetensors": safe,
            "adapter_model.safetensors": safe}  # fmt: skip


def _fill(cache: Path, store: Store) -> None:
    """Put into a cache what an environment of a bundle has there."""
    requests = [
        parse_request(shape.kind, {"name": f"org/{name}", **shape.entry})
        for name, shape in SHAPES.items()
    ]
    files = HubFiles(offline=False, store=store, progress=lambda line: None)
    with store.lock():
        for source in make_hub_sources(resolve(requests, [], files), files, Target.from_host()):
            assert source.tree is not None
            assert source.prefix == f"{STATE}/{HUB}"
            for file in source.tree.files:
                (cache / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.source, cache / file.path)
            for path, goal in source.tree.links:
                (cache / path).parent.mkdir(parents=True, exist_ok=True)
                (cache / path).symlink_to(goal)


def _calls(name: str, shape: Shape) -> list[str]:
    return [call.replace("N", f"org/{name}") for call in (*shape.same, *shape.missing)]


def _ask(top: Path, place: str) -> dict[str, Any]:
    code = top / "code"
    code.mkdir(exist_ok=True)
    for module in ("patches", "hub_datasets"):
        shutil.copy(PACKAGE / f"{module}.py", code / f"_stager_{module}.py")
    env = {**os.environ, "PYTHONPATH": str(code), "HF_HOME": str(top / place)}
    env |= {"STAGER_PATCHES": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    calls = [call for name, shape in SHAPES.items() for call in _calls(name, shape)]
    done = run([sys.executable, "-c", ASK], env=env, given=json.dumps(calls))
    assert done.returncode == 0, done.stderr
    line = next(one for one in done.stdout.splitlines() if one.startswith("ANSWERS "))
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_offline_is_as_online_or_names_what_is_missing(
    name: str, answers: dict[str, tuple[Any, Any]]
) -> None:
    shape = SHAPES[name]
    for call in shape.same:
        online, offline = answers[call.replace("N", f"org/{name}")]
        if str(online).startswith("ERROR"):  # the messages have paths in them
            assert offline.split()[:2] == online.split()[:2], (call, online, offline)
        else:
            assert offline == online, call
    for call, named in shape.missing.items():
        offline = answers[call.replace("N", f"org/{name}")][1]
        assert str(offline).startswith("ERROR"), (call, offline)
        assert named in offline, (call, offline)
