import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from bundle.protocol.job import ONE_A_CPU
from stager.config import load
from stager.config.inline_script import load_script
from stager.config.job_settings import list_rows, make_key
from stager.config.template import fill_template
from stager.core import toml
from stager.core.errors import ConfigError
from stager.hub.repositories import HubRequest


def write(folder: Path, text: str, name: str = "stager.toml") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def problems(data: dict[str, Any], tmp_path: Path) -> tuple[str, ...]:
    data.setdefault("environment", {}).setdefault("requirements", [])
    with pytest.raises(ConfigError) as caught:
        load.parse(data, root=tmp_path, source=tmp_path / "stager.toml")
    assert caught.value.hint
    return caught.value.context


@pytest.mark.parametrize("output", ["../x", "/tmp/x", "a/../../x"])
def test_outputs_outside_the_jobs_folder_are_refused(output: str, tmp_path: Path) -> None:
    (line,) = problems({"project": {"outputs": ["out", output]}}, tmp_path)
    assert line == f"project.outputs: {output!r} lies outside the folder that a job runs in"


def test_every_key_is_in_the_template_and_arrives(tmp_path: Path, isolated: Path) -> None:
    filled = fill_template(["requirements.in", 'numpy>=2; python_version > "3.9"'])
    bare = {"environment": {"requirements": []}}
    default = load.parse(bare, root=tmp_path, source=tmp_path / "stager.toml")
    found = load.load(write(tmp_path, filled))
    assert (found.launch, found.cluster) == (default.launch, default.cluster)
    named = ("requirements.in", 'numpy>=2; python_version > "3.9"')
    assert found.environment.requirements == named
    text = re.sub(r"(?m)^# ([a-z-]+ = )", r"\1", filled)
    write(tmp_path, text)
    found = load.load(tmp_path)
    changed = {
        "offline_root": isolated / "offline_repo_py311",
        "torch_backend": None,
        "find_links": (f"{tmp_path}/wheels",),
        "build_env": (("MAX_JOBS", "4"),),
        "path": tmp_path,
        "resume_limit": 2_000_000_000,
        "compile_cache_limit": 2_000_000_000,
        "paths": (tmp_path / "data/train.csv", tmp_path / "caches/tiktoken"),
        "env": (("TIKTOKEN_CACHE_DIR", tmp_path / "caches/tiktoken"),),
        "models": (HubRequest(kind="model", name="google/bert_uncased_L-2_H-128_A-2"),),
        "datasets": (HubRequest(kind="dataset", name="fancyzhx/ag_news"),),
        "spaces": (HubRequest(kind="space", name="evaluate-metric/accuracy"),),
        "nodes": (1, 1),
        "gpus_per_node": "4",
        "nproc_per_node": None,
        "omp_num_threads": None,
        "on_failure": ("notify-team", "--channel", "ml"),
        "allowed_signers": tmp_path / "allowed_signers",
    }
    document = toml.loads(text, tmp_path)
    for table, kind in load.SECTIONS.items():
        for name in list_rows(kind):
            written = document[table][make_key(name)]
            written = tuple(written) if isinstance(written, list) else written
            assert getattr(getattr(found, table), name) == changed.get(name, written), name


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("environment", "interpreter", "bundled", "bundled"),
        ("cluster", "exclude", ["n1", "n2"], "n1,n2"),
        ("cluster", "node-root", "$SCRATCH/nodes", "$SCRATCH/nodes"),
        ("cluster", "log-mode", "group", "group"),
        ("cluster", "stage", "always", "always"),
        ("cluster", "transfer", "sbcast", "sbcast"),
        ("cluster", "container-mounts", ["/data:/data:ro"], ("/data:/data:ro",)),
        ("launch", "launcher", "srun", "srun"),
        ("launch", "backend", "gloo", "gloo"),
        ("launch", "interface", {"n[1-3]": "ens1f1"}, (("n[1-3]", "ens1f1"),)),
        ("environment", "interpreter", "./py", "/project/py"),
        ("environment", "prune", ["tests", "tests", "My.Pkg:/t/"], ("my-pkg:/t/", "tests")),
        ("project", "resume-limit", "1.5kB", 1500),
        ("assets", "paths", ["a", "/b"], (Path("/project/a"), Path("/b"))),
        ("cluster", "time", 90, "90"),
        ("cluster", "nodes", 3, (3, 3)),
        ("cluster", "nodes", "3", (3, 3)),
        ("cluster", "nodes", "2:4", (2, 4)),
        ("cluster", "gpus-per-node", "a100:4", "a100:4"),
        ("cluster", "gpus-per-node", "v100:4,a100:2", "v100:4,a100:2"),
        ("cluster", "gpus-per-node", "gpu:a100:4", "a100:4"),
        ("cluster", "mem", "64GB", "64G"),
        ("cluster", "mem", 0, "0"),
        ("cluster", "time", "UNLIMITED", "UNLIMITED"),
        ("launch", "hang-timeout", "00:30:00", 1800.0),
        ("launch", "hang-timeout", "1-2", 93_600.0),
        ("launch", "hang-timeout", "5:30", 330.0),
        ("launch", "hang-timeout", 30, 1800.0),
        ("launch", "nproc-per-node", "gpu", None),
        ("launch", "nproc-per-node", "cpu", ONE_A_CPU),
        ("environment", "torch-backend", "none", None),
        ("environment", "torch-backend", "cu126", "cu126"),
        ("project", "path", False, None),
    ],
)
def test_a_value_in_another_form(table: str, key: str, value: object, expected: object) -> None:
    data: dict[str, Any] = {"environment": {"requirements": []}}
    data.setdefault(table, {})[key] = value
    root = Path("/project")
    found = load.parse(data, root=root, source=root / "stager.toml")
    assert getattr(getattr(found, table), key.replace("-", "_")) == expected


def test_a_time_without_quotes_is_a_time(tmp_path: Path) -> None:
    write(tmp_path, "[environment]\nrequirements = []\n[cluster]\ntime = 01:30:00\n")
    assert load.load(tmp_path).cluster.time == "01:30:00"


COUNT = "allowed: a whole number from 1 to 65535"
NODES = f'{COUNT}, or "MIN:MAX" in quotes'
STRINGS = 'allowed: a list of strings, for example ["requirements.txt"]'
PRUNED = 'allowed: a list of "headers" and "tests", and of patterns such as "torch:/torch/test/"'
PYTHON = 'allowed: major.minor in quotes, for example "3.11"'


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("environment", "requirement", [], "unknown key; did you mean environment.requirements?"),
        ("cluster", "cpus_per_task", 4, "unknown key; did you mean cluster.cpus-per-task?"),
        ("launch", "nodes", 4, "unknown key; did you mean cluster.nodes?"),
        ("assets", "qqqqqq", 1,
         "unknown key; known are paths, env, caches, models, datasets, spaces"),
        ("cluster", "nodes", "three", f"found the string 'three', {NODES}"),
        ("cluster", "nodes", 0, f"found the number 0, {NODES}"),
        ("cluster", "nodes", True, f"found true, {NODES}"),
        ("cluster", "nodes", "4:2", f"found the string '4:2', {NODES}"),
        ("cluster", "cpus-per-task", 0, f"found the number 0, {COUNT}"),
        ("cluster", "nodes", 65_536, f"found the number 65536, {NODES}"),
        ("cluster", "nodes", 10**26, f"found the number {10**26}, {NODES}"),
        ("cluster", "nodes", "1:65536", f"found the string '1:65536', {NODES}"),
        ("cluster", "min-nodes", 2, "found 2, which is more than cluster.nodes"),
        ("environment", "python", 3.1, f"found the number 3.1, {PYTHON}"),
        ("trust", "require", True,
         "true needs allowed-signers, the file with the keys that may sign"),
        ("environment", "requirements", "numpy", f"found the string 'numpy', {STRINGS}"),
        ("environment", "requirements", ["a", 1], f"found the list ['a', 1], {STRINGS}"),
        ("environment", "prune", "tests", f"found the string 'tests', {PRUNED}"),
        ("environment", "prune", ["p:!*.a"],
         "'p:!*.a' has no pattern that leaves something out after its colon"),
        ("environment", "prune", ["/x:y"],
         "'/x:y' begins with no package's name: write PACKAGE:PATTERN"),
        ("environment", "prune", ["x"], 'unknown word \'x\'; known are "headers" and "tests"'),
        ("launch", "launcher", "mpi",
         'found the string \'mpi\', allowed: "torchrun", "srun" or "processes"'),
    ],
)  # fmt: skip
def test_a_problem_names_the_key_and_what_is_allowed(
    tmp_path: Path, table: str, key: str, value: object, expected: str
) -> None:
    assert problems({table: {key: value}}, tmp_path) == (f"{table}.{key}: {expected}",)


def test_variables_that_stager_sets_are_no_places_for_code(tmp_path: Path) -> None:
    found = problems({"assets": {"caches": ["CUDA_CACHE_PATH", "TRITON_CACHE_DIR"]}}, tmp_path)
    assert found == ("assets.caches[1]: stager sets this variable itself",)


def test_a_wrong_table(tmp_path: Path) -> None:
    assert problems({"clutser": {}}, tmp_path) == ("clutser: unknown key; did you mean cluster?",)
    assert problems({"cluster": 3}, tmp_path) == (
        "cluster: found the number 3, allowed: a table, written [cluster]",
    )


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("environment", "platform", "linux"),
        ("environment", "interpreter", "bundeld"),
        ("environment", "torch-backend", "cuda12"),
        ("environment", "imports", ["torch nn"]),
        ("environment", "imports", ["os; bad()"]),
        ("environment", "offline-root", "~nobody-of-this-name/x"),
        ("cluster", "time", "half an hour"),
        ("cluster", "partition", "two words"),
        ("cluster", "stage", "sometimes"),
        ("cluster", "gpus-per-node", "a100:0"),
        ("cluster", "mem", "64KBs"),
        ("launch", "nproc-per-node", "xpu"),
        ("cluster", "gpus-per-node", True),
        ("cluster", "gpus-per-node", "a100:100000"),
        ("launch", "nproc-per-node", 100_000),
        ("cluster", "container-mounts", ["/scratch"]),
        ("launch", "pass-env", ["HF_TOKEN=secret"]),
        ("launch", "on-failure", "notify 'open"),
        ("cluster", "avoid-bad", "yes"),
        ("cluster", "node-root", "relative/path"),
        ("launch", "interface", {}),
        ("launch", "omp-num-threads", "many"),
        ("launch", "max-restarts", -1),
        ("launch", "grace-seconds", 0),
        ("launch", "hang-timeout", "UNLIMITED"),
        ("launch", "hang-timeout", -1),
        ("launch", "hang-timeout", "9" * 4000),
        ("launch", "hang-timeout", False),
        ("project", "path", True),
        ("project", "name", "../x"),
        ("project", "name", "n" * 101),
        ("project", "resume-limit", "2 gigabytes"),
        ("project", "resume-limit", 2),
    ],
)
def test_a_value_out_of_range(tmp_path: Path, table: str, key: str, value: object) -> None:
    (line,) = problems({table: {key: value}}, tmp_path)
    assert line.startswith(f"{table}.{key}: found ")
    assert ", allowed: " in line


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("environment", "offline-root", "/tmp/\0"),
        ("environment", "requirements", ["numpy", "a\0b.txt"]),
        ("launch", "interface", {"node\0": "eth0"}),
    ],
)
def test_a_nul_character_is_refused_in_every_string(
    tmp_path: Path, table: str, key: str, value: object
) -> None:
    (line,) = problems({table: {key: value}}, tmp_path)
    assert line.startswith(f"{table}.{key}: found ")
    assert line.endswith(", with a NUL character in it; remove that")


def test_a_long_folder_gives_a_short_name(tmp_path: Path) -> None:
    root = tmp_path / ("f" * 250)
    data = {"environment": {"requirements": []}}
    assert load.parse(data, root=root, source=root / "stager.toml").name == "f" * 100


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Also that there are no wheels for a target."""
    data = {"cluster": {"nodes": "x", "tiem": 1}, "launch": {"backend": "mpi"}, "extra": {}}
    found = problems({**data, "environment": {"python": "4.0"}}, tmp_path)
    keys = {line.partition(":")[0] for line in found}
    assert {"cluster.nodes", "launch.backend", "extra", "cluster.tiem"} < keys
    assert len(found) == 5


def test_requirements_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load.parse({}, root=tmp_path, source=tmp_path / "stager.toml")
    assert caught.value.context == (
        'environment.requirements: missing; name what to install: ["requirements.txt"]',
    )


def test_the_nearest_file_wins(tmp_path: Path) -> None:
    write(tmp_path, "[environment]\nrequirements = ['outer']\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert load.load(inner).root == tmp_path
    write(tmp_path / "a", "[tool.stager.environment]\nrequirements = ['mid']\n", "pyproject.toml")
    assert load.load(inner).root == tmp_path / "a"
    write(tmp_path / "a", "[environment]\nrequirements = ['own']\n")
    assert load.load(inner).environment.requirements == ("own",)
    write(inner, "[environment]\nrequirements = ['inner']\n")
    above = load.load(inner / "..")  # as in `stager --project .. run`
    assert (above.root, above.name) == (tmp_path / "a", "a")


def test_pyproject_stands_for_its_own_dependencies(tmp_path: Path) -> None:
    write(
        tmp_path,
        "[project]\nname = 'p'\n[tool.stager.launch]\nbackend = 'gloo'\n",
        "pyproject.toml",
    )
    found = load.load(tmp_path)
    assert found.environment.requirements == ("pyproject.toml",)
    assert found.launch.backend == "gloo"


def test_a_pyproject_that_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "[environment]\nrequirements = []\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    write(inner, "this is not TOML", "pyproject.toml")
    assert load.load(inner).root == tmp_path
    write(inner, "[tool.stager]\nthis is not TOML", "pyproject.toml")
    with pytest.raises(ConfigError, match=r"pyproject.toml: line 2, column 6"):
        load.load(inner)


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nstager = 3", "[[tool.stager]]\nx = 1"])
def test_a_table_of_ours_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, f"{text}\n", "pyproject.toml")
    with pytest.raises(ConfigError, match=r"tool\.stager: found (the number 3|a list|the list)"):
        load.load(tmp_path / "pyproject.toml")
    with pytest.raises(ConfigError):
        load.load(tmp_path)


@pytest.mark.parametrize("line", ["environment = 3", 'project = "x"'])
def test_a_table_of_a_script_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(f"# /// script\n# [tool.stager]\n# {line}\n# ///\n")
    with pytest.raises(ConfigError) as caught:
        load_script(Path("s.py"))
    assert re.match("(environment|project): found", caught.value.context[0])


def test_no_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load.load(tmp_path)
    assert "stager init" in caught.value.hint
    assert str(tmp_path) in caught.value.context[0]
    with pytest.raises(ConfigError, match="File name too long"):
        load.load(tmp_path / ("a" * 300))
