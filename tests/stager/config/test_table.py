"""Settings from variables and from the user's own file, and what is said of each."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from stager.building.current_bundle import offline_root
from stager.config import table
from stager.config.load import Config, load, parse
from stager.config.table import SettingsSource, load_site_source, make_variable_name
from stager.core.errors import ConfigError
from stager.hub.client import user_caches
from stager.logs.job_files import choose_log_dir

REPO = Path(__file__).resolve().parents[3]
FILE = "/home/u/config.toml"
PROJECT = {"environment": {"requirements": []}, "cluster": {"nodes": 3, "partition": "own"}}
USER = {"cluster": {"partition": "users", "account": "ml"}, "launch": {"backend": "gloo"}}


def parsed(env: dict[str, str], user: dict[str, Any] = USER) -> Config:
    source = SettingsSource(name=FILE, origin="user", data=user)
    folder = Path("/project")
    return parse(PROJECT, root=folder, source=folder / "stager.toml", defaults=[source], env=env)


def test_the_first_place_that_has_a_key_wins() -> None:
    config = parsed({"STAGER_CLUSTER_NODES": "2:4"})
    assert config.cluster.nodes == (2, 4)
    assert (config.cluster.partition, config.cluster.account) == ("own", "ml")
    came = {setting.key: (setting.origin, setting.place) for setting in config.settings}
    assert came["cluster.nodes"] == ("variable", "STAGER_CLUSTER_NODES")
    assert came["cluster.partition"] == ("project", "/project/stager.toml")
    assert came["cluster.account"] == ("user", "/home/u/config.toml")
    assert came["cluster.time"] == ("default", "")


@pytest.mark.parametrize(
    ("key", "text", "table", "value"),
    [
        ("environment.python", "3.11", "environment", "3.11"),
        ("environment.imports", "torch numpy", "environment", ("torch", "numpy")),
        ("project.command", 'train.py "a b"', "project", ("train.py", "a b")),
        ("project.command", '["x.py", "3"]', "project", ("x.py", "3")),
        ("project.path", "false", "project", None),
        ("cluster.partition", "2024", "cluster", "2024"),
        ("cluster.time", "00:30:00", "cluster", "00:30:00"),
        ("launch.interface", '{ "n[1-2]" = "eth1" }', "launch", (("n[1-2]", "eth1"),)),
        ("launch.on-failure", "tell 'the team'", "launch", ("tell", "the team")),
    ],
)
def test_a_variable_is_read_as_its_key_allows(
    key: str, text: str, table: str, value: object
) -> None:
    config = parsed({make_variable_name(key): text})
    field = key.partition(".")[2].replace("-", "_")
    assert getattr(getattr(config, table), field) == value


@pytest.mark.parametrize(
    ("env", "user", "place", "said"),
    [
        ({"STAGER_CLUSTER_NODES": "many"}, USER, "STAGER_CLUSTER_NODES",
         "STAGER_CLUSTER_NODES: found the string 'many', allowed: a whole number"),
        ({"STAGER_CLUSTER_NODES": "2\nx = 3"}, USER, "STAGER_CLUSTER_NODES",
         "STAGER_CLUSTER_NODES: found the string"),
        ({"STAGER_CLUSTER_NODE": "2"}, USER, "STAGER_CLUSTER_NODE",
         "did you mean STAGER_CLUSTER_NODES?"),
        ({"STAGER_LAUNCH_NPROC": "2"}, USER, "STAGER_LAUNCH_NPROC",
         "STAGER_LAUNCH_NPROC: unknown variable"),
        ({"STAGER_CLUSTER_MIN_NODES": "9"}, USER, "STAGER_CLUSTER_MIN_NODES",
         "STAGER_CLUSTER_MIN_NODES: found 9, which is"),
        ({}, {"launch": {"backend": "mpi"}}, FILE, f"launch.backend in {FILE}: found"),
        ({}, {"launch": {"bakend": "x"}}, FILE, f"launch.bakend in {FILE}: unknown key"),
        ({}, {"cluster": 3}, FILE, f"cluster in {FILE}: found the number 3"),
        ({"STAGER_CLUSTER_NODES": "x"}, {"launch": {"backend": "mpi"}},
         f"STAGER_CLUSTER_NODES, {FILE}", "launch.backend"),
    ],
)  # fmt: skip
def test_a_problem_names_its_place(
    env: dict[str, str], user: dict[str, Any], place: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)) as caught:
        parsed(env, user)
    count = len(caught.value.context)
    words = "1 problem" if count == 1 else f"{count} problems"
    assert caught.value.message == f"{place}: {words} in the settings"
    assert said in caught.value.context[-1]


def test_variables_that_mean_something_else_are_no_settings() -> None:
    """All that the code on either side reads or sets under our prefix."""
    code = [*REPO.glob("bundle/**/*.py"), *REPO.glob("stager/**/*"), *REPO.glob("trainer/**/*.py")]
    texts = "\n".join(file.read_text() for file in code if file.suffix in (".py", ".sh", ".j2"))
    used = {name.rstrip("_") for name in re.findall(r"STAGER_[A-Z_]+", texts)}
    settings = {make_variable_name(setting.key) for setting in parsed({}).settings}
    assert {"STAGER_NODE_ROOT", "STAGER_PROJECT", "STAGER_ENV"} <= used
    assert not used - {"STAGER_CLUSTER_MIN_NODES"} & settings
    parsed(dict.fromkeys(used - settings, "x"))


def test_the_users_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stager.toml").write_text("[environment]\nrequirements = []\n")
    own = tmp_path / "settings" / "stager" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[cluster]\npartition = "gpu"\nnodes = 4\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("STAGER_CLUSTER_NODES", "2")
    config = load(tmp_path)
    assert (config.cluster.partition, config.cluster.nodes) == ("gpu", (2, 2))
    own.write_text("[cluster\n")
    with pytest.raises(ConfigError, match=re.escape(str(own))):
        load(tmp_path)
    for make in (own.mkdir, lambda: os.mkfifo(own), lambda: own.symlink_to(own)):
        own.unlink()
        make()
        with pytest.raises(ConfigError, match=re.escape(f"cannot read {own}")):
            load(tmp_path)
        if own.is_dir():
            own.rmdir()
            own.touch()


def test_a_user_without_a_home_has_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a number of a user that nobody knows."""
    (tmp_path / "stager.toml").write_text("[environment]\nrequirements = []\n")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("OFFLINE_ROOT")
    monkeypatch.setattr(pwd, "getpwuid", dict[int, object]().__getitem__)
    config = load(tmp_path)
    assert user_caches(os.environ)
    with pytest.raises(ConfigError, match="no home directory") as caught:
        offline_root(config)
    assert "HOME" in caught.value.hint
    with pytest.raises(ConfigError, match="slurm_logs"):
        choose_log_dir(None)


def of_site(data: dict[str, Any], fixed: tuple[str, ...], env: dict[str, str]) -> Config:
    account = {"cluster": {"account": "ml"}}
    user = SettingsSource(name="/home/u/config.toml", origin="user", data=account)
    site = SettingsSource(name="/etc/stager/config.toml", origin="site", data=data, fixed=fixed)
    folder = Path("/project")
    return parse(
        PROJECT, root=folder, source=folder / "stager.toml", defaults=[user, site], env=env
    )


def test_a_site_gives_defaults_below_those_of_all_others() -> None:
    config = of_site({"cluster": {"partition": "site", "account": "site", "qos": "site"}}, (), {})
    cluster = config.cluster
    assert (cluster.partition, cluster.account, cluster.qos) == ("own", "ml", "site")
    came = {setting.key: (setting.origin, setting.place) for setting in config.settings}
    assert came["cluster.qos"] == ("site", "/etc/stager/config.toml")
    fixed = of_site({"cluster": {"node-root": "/scratch"}}, ("cluster.node-root",), {})
    assert fixed.cluster.node_root == "/scratch"  # where nobody else sets it
    with pytest.raises(ConfigError, match="2 problems"):  # without a value its default is fixed
        of_site({}, ("cluster.partition",), {"STAGER_CLUSTER_PARTITION": "mine"})


@pytest.mark.parametrize(
    ("env", "places"),
    [
        ({}, ["cluster.partition"]),
        ({"STAGER_CLUSTER_NODE_ROOT": "/scratch"}, ["cluster.partition"]),  # the site's own value
        ({"STAGER_CLUSTER_NODE_ROOT": "/tmp"}, ["STAGER_CLUSTER_NODE_ROOT", "cluster.partition"]),
        ({"STAGER_NODE_ROOT": "/dev/shm"}, ["STAGER_NODE_ROOT", "cluster.partition"]),
    ],
)
def test_what_a_site_has_fixed_cannot_be_set_elsewhere(
    env: dict[str, str], places: list[str]
) -> None:
    site = {"cluster": {"node-root": "/scratch", "partition": "site"}}
    with pytest.raises(ConfigError) as caught:
        of_site(site, ("cluster.node-root", "cluster.partition"), env)
    wrong = "fixed by your site in /etc/stager/config.toml: remove it here"
    assert sorted(caught.value.context) == [f"{place}: {wrong}" for place in places]


@pytest.mark.parametrize(
    ("text", "mode", "wrong"),
    [
        ('fixed = ["trust"]', 0o664, "others than its owner may write to it"),
        ("fixed = true", 0o644, "allowed: a list of keys"),
        ("fixed = ", 0o644, "config.toml"),
        ('fixed = ["cluster.noderoot"]', 0o644, "cluster.noderoot is no setting"),
        ('[trust]\nallowed-signers = "signers"', 0o644, "signers is no absolute path"),
    ],
)
def test_a_site_file_that_cannot_be_trusted_or_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: int, wrong: str
) -> None:
    monkeypatch.setattr(table, "SITE_FILE", tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "config.toml").chmod(mode)
    with pytest.raises(ConfigError) as caught:
        parse(
            PROJECT, root=tmp_path, source=tmp_path / "stager.toml", defaults=[load_site_source()]
        )
    assert wrong in "\n".join([str(caught.value), *caught.value.context])
