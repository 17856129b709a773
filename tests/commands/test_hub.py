"""Models and data sets of a hub: locked, fetched, bundled and found, with the real client."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stager.core import toml
from tests.support.building import Project, Recorder
from tests.support.hub_server import HubServer, Repository, serve_hub

pytest.importorskip("huggingface_hub")

WEIGHTS = random.Random(1).randbytes(50_000)
"""Large enough for large file storage."""
MODEL = Repository(
    name="org/tiny",
    files={
        "config.json": b'{"model_type": "bert"}',
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"p" * 5000,
        "tf_model.h5": b"t" * 5000,
    },
    card={"license": "apache-2.0"},
    tags=("v1",),
)
SIBLING = Repository(
    name="org/sibling", files={"config.json": b"{}", "model.safetensors": WEIGHTS}, card={}
)
DATA = Repository(
    name="org/news",
    kind="dataset",
    files={
        "README.md": b"---\nlicense: mit\n---\n",
        "data/train-0.parquet": b"T" * 3000,
        "data/test-0.parquet": b"S" * 2000,
        "other/train.csv": b"x" * 100,
    },
    card={
        "license": "mit",
        "configs": [
            {"config_name": "default", "data_files": [
                {"split": "train", "path": "data/train-*"},
                {"split": "test", "path": "data/test-*"},
            ]},
            {"config_name": "other", "data_files": "other/*.csv"},
        ],
    },
)  # fmt: skip
SPACE = Repository(name="org/f1", kind="space", files={"f1.py": b"pass\n"})
FIND = """
import json, os, pathlib
cache = pathlib.Path(os.environ["HF_HUB_CACHE"])
print(json.dumps({
    "cache": str(cache),
    "home": os.environ["HF_HOME"],
    "offline": os.environ["HF_HUB_OFFLINE"],
    "found": {str(path.relative_to(cache)): path.read_bytes().hex()[:8]
              for name in cache.iterdir() if name.is_dir()
              for path in name.rglob("*") if path.is_file()},
}))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve_hub(HubServer(repositories=[MODEL, SIBLING, DATA, SPACE])) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield running


def naming(project: Project, models: str = "[]", datasets: str = "[]") -> Project:
    return project.settings("alpha", more=f"[assets]\nmodels = {models}\ndatasets = {datasets}")


def done(project: Project, *arguments: str, **env: str) -> dict[str, Any]:
    ran = project.expect(*arguments, env=env)
    assert "\r" not in ran.stderr  # bars are for terminals
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def refused(project: Project, *arguments: str, **env: str) -> str:
    ran = project.stager(*arguments, env=env)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stderr


def in_environment(project: Project, **env: str) -> dict[str, Any]:
    return done(project, "exec", "--", "python", "-c", FIND, **env)


def test_from_a_name_to_files_in_the_environment(project: Project, hub: HubServer) -> None:
    naming(project, '["org/tiny", "org/sibling"]', '["org/news"]\nspaces = ["org/f1"]')
    locked = done(project, "lock", "--json")
    assert (locked["models"], locked["datasets"], locked["spaces"]) == (2, 1, 1)
    assert locked["left_out"] == {"model org/tiny": ["pytorch_model.bin", "tf_model.h5"]}
    assert (
        "  model org/tiny without pytorch_model.bin, tf_model.h5" in project.stager("lock").stderr
    )
    entries = toml.read(Path(locked["lock"]))["tool"]["stager"]["assets"]
    assert [entry["commit"] for entry in entries] == [
        MODEL.commit, SIBLING.commit, DATA.commit, SPACE.commit,
    ]  # fmt: skip
    assert [entry["licence"] for entry in entries] == ["apache-2.0", "", "mit", ""]
    # Weights of other frameworks, and pickled ones beside safetensors, stay where they are.
    assert [file["path"] for file in entries[0]["content"]] == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert not any("GET /storage/" in line for line in hub.asked)  # no weights for a lock

    built = done(project, "build", "--json", "--locked")
    assert built["layers_built"] == 4 + 4
    assert sum("GET /storage/" in line for line in hub.asked) == 3  # the shared weights once
    assert not (project.store.root / "hub").exists()

    inspected = done(project, "inspect", "--json")
    assert [(one["type"], one["name"], one["licence"]) for one in inspected["hub"]] == [
        ("model", "org/tiny", "apache-2.0"),
        ("model", "org/sibling", ""),
        ("dataset", "org/news", "mit"),
        ("space", "org/f1", ""),
    ]
    assert inspected["hub"][1]["unpacked_bytes"] < 1000 < inspected["hub"][0]["unpacked_bytes"]
    said = project.stager("inspect").stdout
    assert f"model org/tiny {MODEL.commit[:12]}" in said
    assert "no licence named" in said
    assert "\n  without pytorch_model.bin, tf_model.h5\n" in said
    licences = {
        one["name"]: one for one in done(project, "inspect", "--licenses", "--json")["components"]
    }
    assert licences["org/tiny"]["licence"] == "Apache-2.0"
    assert licences["org/sibling"]["licence"] == ""
    # The weights that two models share are stored with the first of them.
    bill = {one["name"]: one for one in done(project, "inspect", "--sbom")["components"]}
    shared = {one["name"]: one["hashes"][0]["content"] for one in bill["sibling"]["components"]}
    assert shared.keys() == {"config.json", "model.safetensors"}
    assert shared["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()

    seen = in_environment(project)
    snapshot = f"models--org--sibling/snapshots/{SIBLING.commit}"
    assert seen["found"][f"{snapshot}/model.safetensors"] == WEIGHTS.hex()[:8]
    assert f"datasets--org--news/snapshots/{DATA.commit}/data/train-0.parquet" in seen["found"]
    assert "models--org--tiny/refs/main" in seen["found"]
    assert f"spaces--org--f1/snapshots/{SPACE.commit}/f1.py" in seen["found"]
    assert seen["offline"] == "1"
    assert seen["home"] != seen["cache"]


@pytest.mark.full
def test_a_second_build_asks_the_hub_nothing(project: Project, hub: HubServer) -> None:
    naming(project, '["org/tiny@v1"]')
    first = done(project, "build", "--json", "--no-prove")
    hub.asked.clear()
    again = done(project, "build", "--json", "--no-prove", "--offline", "--locked")
    assert (again["id"], again["layers_built"], hub.asked) == (first["id"], 0, [])
    # Whatever moved on the hub, the lock stays put, also when it is made again.
    done(project, "lock", "--json")
    assert hub.asked == []
    moved = [replace(MODEL, files={**MODEL.files, "config.json": b"{}"})]
    hub.repositories[:] = [*moved, SIBLING]
    done(project, "lock", "--json")
    assert MODEL.commit in (project.root / "pylock.toml").read_text()
    done(project, "lock", "--json", "--upgrade")
    assert moved[0].commit in (project.root / "pylock.toml").read_text()
    # Another model sends no model again.
    naming(project, '["org/tiny@v1", "org/sibling"]')
    more = done(project, "build", "--json", "--no-prove")
    assert more["layers_built"] == 3  # the project has a new stager.toml, one model moved
    # A revision that was named is found by programs that name none.
    assert "models--org--tiny/refs/main" in in_environment(project)["found"]


def test_a_bundle_in_the_offline_root_has_them_where_no_hub_is(
    project: Project, hub: HubServer, tmp_path: Path
) -> None:
    """After an import neither their layers nor their files are here."""
    first = naming(project, '["org/tiny", "org/sibling"]', '["org/news"]').build()
    carried = str(tmp_path / "carried")
    done(project, "export", "--json", "-o", carried)
    shutil.rmtree(project.store.root)
    done(project, "import", "--json", "--for-builds", carried)
    assert not any(project.store.layers.iterdir())
    asked = len(hub.asked)
    assert project.build().packed.manifest == first.packed.manifest
    assert len(hub.asked) == asked


def test_one_model_moves_and_the_rest_stays(project: Project, hub: HubServer) -> None:
    naming(project, '["org/tiny", "org/sibling"]', '["org/news"]')
    done(project, "lock", "--json")
    before = (project.root / "pylock.toml").read_text()
    others = [replace(one, files={**one.files, "a": b"new"}) for one in (MODEL, SIBLING, DATA)]
    hub.repositories[:] = others
    hub.asked.clear()
    ran = project.expect("lock", "--upgrade-package", "org/tiny")
    assert f"model org/tiny: {MODEL.commit[:12]} -> {others[0].commit[:12]}" in ran.stderr
    assert {line.split("/api/")[-1].split("?")[0] for line in hub.asked if "/api/" in line} == {
        "models/org/tiny/revision/main"
    } or all("org/tiny" in line for line in hub.asked), hub.asked
    after = (project.root / "pylock.toml").read_text()
    assert [one.commit in after for one in others] == [True, False, False]
    assert SIBLING.commit in after
    assert 'name = "alpha"' in before
    assert before.split("[[packages]]")[1] == after.split("[[packages]]")[1]

    text = refused(project, "build", "--upgrade-package", "org/tine")
    assert "--upgrade-package org/tine: no asset of stager.toml on the hub has this name" in text
    assert "hint: there are org/tiny, org/sibling, org/news" in text


def test_the_users_own_cache_comes_first_and_stays_in_use(
    project: Project, hub: HubServer, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    cache = tmp_path / "mine"
    snapshot_download("org/tiny", cache_dir=cache, endpoint=hub.url)
    snapshot_download("org/sibling", cache_dir=cache, endpoint=hub.url)
    hub.asked.clear()
    naming(project, '["org/tiny"]')
    done(project, "build", "--json", "--no-prove", HF_HUB_CACHE=str(cache))
    assert [line for line in hub.asked if "/api/" not in line] == []
    before = sorted(str(path) for path in cache.rglob("*"))
    found = in_environment(project, HF_HUB_CACHE=str(cache))["found"]
    assert any("org--tiny" in name for name in found)
    assert any("org--sibling" in name for name in found)
    assert sorted(str(path) for path in cache.rglob("*")) == before


def test_without_models_in_the_bundle_the_users_cache_is_the_one(
    project: Project, tmp_path: Path
) -> None:
    usual = Path(os.environ["HOME"]) / ".cache" / "huggingface" / "hub"
    usual.mkdir(parents=True)
    project.build()
    assert in_environment(project)["cache"] == str(usual)
    named = tmp_path / "shared"
    named.mkdir()
    assert in_environment(project, HF_HUB_CACHE=str(named))["cache"] == str(named)


def test_a_damaged_file_of_the_users_cache_is_fetched(
    project: Project, hub: HubServer, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    found = Path(snapshot_download("org/tiny", cache_dir=tmp_path / "mine", endpoint=hub.url))
    for name in ("model.safetensors", "config.json"):  # one in large file storage, and one in git
        file = (found / name).resolve()
        file.write_bytes(bytes(file.stat().st_size))
    naming(project, '["org/tiny"]')
    done(project, "build", "--json", "--no-prove", HF_HUB_CACHE=str(tmp_path / "mine"))
    there = in_environment(project)["found"]
    for name in ("model.safetensors", "config.json"):
        path = f"models--org--tiny/snapshots/{MODEL.commit}/{name}"
        assert there[path] == MODEL.files[name].hex()[:8]


def test_a_gated_model_names_itself_and_the_token_goes_nowhere(
    project: Project, hub: HubServer
) -> None:
    hub.repositories.append(
        Repository(name="org/gated", gated=True, files={"config.json": b"{}", "a.bin": WEIGHTS})
    )
    naming(project, '["org/gated"]')
    text = refused(project, "build", "--no-prove")
    assert "org/gated is gated" in text
    assert "HF_TOKEN" in text
    text = refused(project, "build", "--no-prove", HF_TOKEN="hf_wrong-but-secret-0123")
    assert "org/gated" in text
    assert "wrong-but-secret" not in text
    done(project, "build", "--json", "--no-prove", HF_TOKEN=hub.token)
    for path in [*project.root.rglob("*"), *project.store.root.rglob("*")]:
        if path.is_file():
            assert hub.token.encode() not in path.read_bytes(), path


def test_a_cut_download_goes_on(
    project: Project, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # 10 MB else
    hub.cut.add("model.safetensors")
    naming(project, '["org/tiny"]').build()
    assert [line for line in hub.asked if "bytes=25000-" in line], hub.asked


@pytest.mark.parametrize(
    ("models", "datasets", "said"),
    [
        ('["org/none"]', "[]", "model org/none: the hub has no such repository"),
        ('["org/tiny@v9"]', "[]", "model org/tiny@v9: there is no such revision"),
        ("[]", '[{name = "org/news", config = "third"}]', "it has default"),
        ("[]", '[{name = "org/news", split = "fourth"}]', "no file of it is asked for"),
        ("[3]", "[]", "assets.models[0]: neither a string nor a table"),
    ],
)
def test_what_cannot_be_had_is_named(
    project: Project, hub: HubServer, models: str, datasets: str, said: str
) -> None:
    assert said in refused(naming(project, models, datasets), "lock").replace("\n", " ")


def test_a_run_after_the_settings_have_changed_says_so(project: Project, hub: HubServer) -> None:
    naming(project, '["org/tiny"]').build(Recorder())
    naming(project, '["org/tiny", "org/sibling"]')
    assert "lacks org/sibling" in refused(project, "exec", "--", "true")


def test_without_the_library_the_extra_is_named(project: Project, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('none here')\n")
    naming(project, '["org/tiny"]')
    text = refused(project, "lock", PYTHONPATH=str(tmp_path))
    assert "in the clone of stager: uv tool install --reinstall '.[hub]'" in text
    assert "pip install huggingface_hub" in text


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        (Repository(name="o/n", files={"a.json": b"{}", "b\n../c": b"x"}), "its name leaves"),
        (Repository(name="o/n", files={"n" * 300: b"x"}), "a name of 300 bytes, more than 255"),
        (
            Repository(name="o/n", files=MODEL.files, listed={"config.json": {"size": -1}}),
            "'config.json': its size is -1",
        ),
        (
            Repository(
                name="o/n",
                files=MODEL.files,
                listed={"model.safetensors": {"lfs": {"sha256": "0", "size": 1, "pointerSize": 1}}},
            ),
            "'model.safetensors': its digest is not a sha256",
        ),
        (
            Repository(name="o/n", files={"a.json": b"{}"}, served={"a.json": b"[]"}),
            "a.json is not the file that the hub lists",
        ),
    ],
)
def test_a_hub_that_says_nonsense(
    project: Project, hub: HubServer, repository: Repository, said: str
) -> None:
    hub.repositories.append(repository)
    naming(project, '["o/n"]')
    text = refused(project, "lock")
    assert said in text
    assert "hint: " in text
    assert "tool.stager.assets" not in (project.root / "pylock.toml").read_text()


def test_a_name_that_leads_out_of_the_cache_is_not_followed(
    project: Project, hub: HubServer, tmp_path: Path
) -> None:
    """The library writes where it leads; nothing there is taken, and nothing removed."""
    outside = tmp_path / "outside"
    steps = "../" * 30
    files = {"a.json": b"{}"}
    hub.repositories.append(
        Repository(name="o/n", files=files, etags={"a.json": f"{steps}{str(outside)[1:]}"})
    )
    outside.write_bytes(b"precious")
    naming(project, '["o/n"]')
    text = refused(project, "lock")
    assert "leads out of" in text
    assert outside.read_bytes() == b"precious"


@pytest.mark.parametrize("card", ["a text", {"license": [{}], "configs": 3}])
def test_a_card_that_makes_no_sense_says_nothing(
    project: Project, hub: HubServer, card: Any
) -> None:
    hub.repositories.append(Repository(name="o/n", files={"a.json": b"{}"}, card=card))
    naming(project, '["o/n"]')
    assert done(project, "lock", "--json")["models"] == 1
