"""Training by name: a model and a data set of a hub, from the bundle alone, with no network."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import PATIENT, HubServer, Repository, serve_hub
from tests.support.namespaces import entering
from tests.support.torch_project import STAGER, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

ROWS, HELD_OUT = 2400, 400
# A user's program, as it would be without stager.
TRAIN = """\
import json
import torch
import torch.distributed as dist
from datasets import load_dataset
from huggingface_hub import snapshot_download
from transformers import AutoModelForSequenceClassification, AutoTokenizer

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
news = load_dataset("org/ag_news")
tokenizer = AutoTokenizer.from_pretrained("org/bert-tiny")
model = AutoModelForSequenceClassification.from_pretrained("org/bert-tiny", num_labels=4)

def batch(rows):
    made = tokenizer(rows["text"], truncation=True, max_length=48, padding="max_length",
                     return_tensors="pt")
    return made, torch.tensor(rows["label"])

ids = batch(news["train"][:100])[0]["input_ids"]
unknown = (ids == tokenizer.unk_token_id).float().mean().item()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
rows = news["train"].shuffle(seed=1).shard(size, rank)
for epoch in range(4):
    for start in range(0, len(rows) - 7, 8):
        inputs, labels = batch(rows[start:start + 8])
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    inputs, labels = batch(news["test"][:])
    right = (model(**inputs).logits.argmax(-1) == labels).float().mean().item()
if rank == 0:
    found = {"accuracy": right, "unknown": unknown, "train": len(news["train"]), "size": size}
    found["snapshot"] = snapshot_download("org/bert-tiny")
    print("FOUND", json.dumps(found), flush=True)
dist.destroy_process_group()
"""
ALONE = """\
ip link set lo up
if ip -o link show up | grep -v ': lo:'; then exit 9; fi
"""
SETTINGS = """
[assets]
models = ["org/bert-tiny"]
datasets = ["org/ag_news"]
"""


def tiny_bert(vocabulary: Path, folder: Path) -> dict[str, bytes]:
    """The files of a BERT that has learnt nothing, the same each time."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    words = len(vocabulary.read_text().splitlines())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["vocab.txt"] = vocabulary.read_bytes()
    files["tokenizer_config.json"] = json.dumps(
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    ).encode()
    return files


def parquet(rows: list[tuple[int, str]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [text for _, text in rows], "label": [at for at, _ in rows]})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path: Path, data_dir: Path) -> Iterator[HubServer]:
    with (data_dir / "ag_news.csv").open(encoding="utf-8", newline="") as file:
        read = csv.reader(file)
        rows = [(int(row[0]) - 1, " ".join(row[1:])) for row in read if row[0].isdigit()]
    assert {label for label, _ in rows[:ROWS]} == {0, 1, 2, 3}
    data = {
        "README.md": b"---\nlicense: other\n---\n",
        "data/train-00000-of-00001.parquet": parquet(rows[HELD_OUT:ROWS]),
        "data/test-00000-of-00001.parquet": parquet(rows[:HELD_OUT]),
    }
    model = tiny_bert(data_dir / "bert_uncased_vocab.txt", tmp_path / "model")
    repositories = [
        Repository(name="org/bert-tiny", files=model, card={"license": "apache-2.0"}),
        Repository(name="org/ag_news", kind="dataset", files=data, card={"license": "other"}),
    ]
    with serve_hub(HubServer(repositories=repositories)) as running:
        yield running


@pytest.mark.full
def test_a_model_and_a_data_set_by_name(
    torch_project: TorchProject, hub: HubServer, tmp_path: Path
) -> None:
    """Two nodes with two ranks each: the user's program knows names, and nothing of a bundle."""
    project = tmp_path / "project"
    shutil.copytree(torch_project.root, project)
    with (project / "stager.toml").open("a") as file:
        file.write(SETTINGS)
    (project / "by_name.py").write_text(TRAIN)
    env = {**torch_project.env, "HF_HUB_DISABLE_XET": "1", **PATIENT}

    def stager(*arguments: str, before: tuple[str, ...] = (), **more: str) -> str:
        done = subprocess.run(
            [*before, STAGER, *arguments],
            cwd=project,
            env={**env, **more},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    stager("build", "--no-prove", HF_ENDPOINT=hub.url)
    options = ["--allocation", "local", "--nodes", "2", "--nproc-per-node", "2", "--json"]
    options += ["--log-dir", str(tmp_path / "logs")]
    alone = tuple(entering("-n", ALONE))
    stager("run", *options, "--", "by_name.py", before=alone)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
    (line,) = [line for line in logs.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["accuracy"] >= 0.5, found  # 0.25 is chance
    assert found["unknown"] < 0.05
    assert (found["train"], found["size"]) == (ROWS - HELD_OUT, 4)
    # The environment is as it was published: nothing was written into the cache in it.
    assert json.loads(stager("verify", *options, "--deep", before=alone))["ok"]
