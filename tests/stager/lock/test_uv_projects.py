"""Projects, locks and scripts of uv: what stands in them decides, or is refused by name."""

import subprocess
from textwrap import dedent
from typing import NamedTuple

import pytest

from stager.building.project_lock import lock_project
from stager.config import load
from stager.core.errors import ConfigError, ResolveError
from stager.core.store import digest_file
from stager.lock.lock import ResolveOptions
from stager.lock.uv import require_uv
from stager.wheels import WheelSource
from tests.support.building import Recorder
from tests.support.golden import check_golden
from tests.support.index_server import Index, serve
from tests.support.locks import versions
from tests.support.sources import git_commit, own_backend
from tests.support.wheelhouse import make_wheel, without_compression


class Indexes(NamedTuple):
    """Two indexes: the usual one, and one that only the project names."""

    usual: Index
    extra: Index


@pytest.fixture
def indexes(wheelhouse, tmp_path, monkeypatch, only_index):
    make_wheel(wheelhouse, "special", "9.0")  # a stranger's, of the name of one on the other index
    extra = tmp_path / "extra"
    make_wheel(extra, "special", "1.0", requires=["beta"])
    make_wheel(extra, "beta", "7.0")
    with serve(Index(folder=wheelhouse)) as usual, serve(Index(folder=extra)) as second:
        only_index(usual.url)
        monkeypatch.setenv("UV_DEFAULT_INDEX", usual.url)
        yield Indexes(usual, second)


def sources(indexes, tmp_path):
    """``[tool.uv]`` with an index for one package, a git repository and a folder."""
    return dedent(f"""\
        [tool.uv.sources]
        special = {{ index = "second" }}
        from-git = {{ git = "{(tmp_path / "from-git").as_uri()}", branch = "main" }}
        from-folder = {{ path = "../from-folder" }}
        [[tool.uv.index]]
        name = "second"
        url = "{indexes.extra.url}"
        explicit = true
        """)


def write_project(folder, dependencies, more="", name="mine"):
    folder.mkdir(exist_ok=True)
    text = f'[project]\nname = "{name}"\nversion = "0"\nrequires-python = ">=3.10"\n'
    (folder / "pyproject.toml").write_text(f"{text}dependencies = [{dependencies}]\n{more}")


EXTRAS = """\
Provides-Extra: table
Requires-Dist: beta<2 ; extra == "table"
"""
NEEDED = '"special", "from-git", "from-folder", "alpha"'
LOCKED = {
    "alpha": "1.0",
    "beta": "2.0",  # not 7.0: the second index is asked for `special` only
    "from-folder": "1.0",
    "from-git": "1.0",
    "special": "1.0",
}


def test_settings_of_a_project_are_uvs_to_honour(lock, ask, indexes, root, tmp_path):
    commit = git_commit(own_backend(tmp_path / "from-git"))
    own_backend(tmp_path / "from-folder")
    write_project(root, NEEDED, sources(indexes, tmp_path))
    made = lock("pyproject.toml", "my-odd.name")
    assert versions(made) == {**LOCKED, "my-odd-name": "1.0"}
    assert [label for _, label in made.sources if label.startswith("git+")] == [
        f"git+{(tmp_path / 'from-git').as_uri()}@{commit}"
    ]
    url = next(file.url for file in made.files if file.name == "special")
    assert str(indexes.extra.port) in str(url)

    (tmp_path / "from-git" / "more.py").write_text("X = 1\n")
    moved = git_commit(tmp_path / "from-git")
    for _ in range(2):
        assert lock("pyproject.toml").git[0].commit == commit  # a branch is a pin, too
    made = lock("pyproject.toml", upgrade_packages=("from-git",))
    assert made.git[0].commit == moved
    (tmp_path / "from-folder" / "from_folder.py").write_text("X = 2\n")
    assert not made.is_current(ask("pyproject.toml"))


@pytest.mark.usefixtures("indexes")
@pytest.mark.parametrize(
    ("name", "table"), [("uv.toml", ""), ("pyproject.toml", "tool.uv.")], ids=["uv.toml", "tool.uv"]
)
def test_settings_in_the_projects_folder_hold_for_requirement_files(lock, ask, root, name, table):
    """As with ``uv pip compile`` there, which does not look beside a file in another folder."""
    (root / "sub").mkdir()
    (root / "sub" / "uv.toml").write_text('resolution = "lowest"\n')
    (root / "sub" / "r.in").write_text("alpha\n")
    before = ask("sub/r.in").digest
    head = f"[{table.rstrip('.')}]\n" if table else ""
    (root / name).write_text(f'{head}constraint-dependencies = ["beta<2"]\n')
    assert ask("sub/r.in").digest != before
    assert versions(lock("sub/r.in")) == {"alpha": "1.0", "beta": "1.1"}
    with pytest.raises(ResolveError, match="settings of uv") as caught:
        lock("sub/r.in", resolver="pip-tools")
    assert caught.value.context == (f"{name}: {table}constraint-dependencies",)
    assert versions(lock("alpha", upgrade=True)) == {"alpha": "1.0", "beta": "2.0"}
    (root / name).write_text(f"{head}pip.universal = true\n")
    with pytest.raises(ConfigError) as refused:
        ask("sub/r.in")
    assert refused.value.context[0].startswith(f"{name}: {table}pip: it is not honoured here")


def test_extras_that_conflict_are_refused(ask, root):
    more = """\
    [project.optional-dependencies]
    cpu = ["alpha"]
    gpu = ["beta"]
    [tool.uv]
    conflicts = [[{ extra = "cpu" }, { extra = "gpu" }]]
    """
    write_project(root, "", dedent(more))
    assert ask("pyproject.toml[cpu]").requirements == ("alpha",)
    with pytest.raises(ConfigError) as caught:
        ask("pyproject.toml[cpu,gpu]")
    assert "does not allow cpu and gpu together" in caught.value.context[0]


def test_the_first_index_with_a_package_counts_unless_the_user_says_otherwise(lock, indexes, root):
    (root / "r.in").write_text(f"--extra-index-url {indexes.extra.url}\nspecial\n")
    assert versions(lock("r.in"))["special"] == "1.0"
    made = lock("r.in", index_strategy="unsafe-best-match", upgrade=True)
    assert versions(made)["special"] == "9.0"


def test_uv_lock_is_read_with_all_that_uv_honours(lock, indexes, root, tmp_path):
    commit = git_commit(own_backend(tmp_path / "from-git"))
    own_backend(tmp_path / "from-folder")
    groups = '[project.optional-dependencies]\nmore = ["my-odd-name"]\n'
    groups += '[dependency-groups]\ndev = ["pth-pkg"]\ntrain = ["ns-one"]\n'
    write_project(root, NEEDED, groups + sources(indexes, tmp_path))
    subprocess.run([*require_uv(), "lock", "-q"], cwd=root, check=True)
    (root / ".python-version").write_text("3.99\n")  # which is not here
    make_wheel(indexes.usual.folder, "alpha", "4.0")  # the lock decides, not the index
    for asked, more in (
        (["uv.lock"], {}),
        (["uv.lock[more]", "uv.lock:train"], {"my-odd-name": "1.0", "ns-one": "1.0"}),
    ):
        made = lock(*asked)
        assert versions(made) == {**LOCKED, **more}
        assert made.git[0].commit == commit
    assert versions(lock("uv.lock:train")) == {"ns-one": "1.0"}


HASHED = """\
alpha==1.0 --hash=sha256:{alpha}
beta==1.1 ; python_version < "3.13" \\
    --hash=sha256:{beta}
cli-tool==1.0 ; sys_platform == "win32" --hash=sha256:{cli_tool}
"""
GROUPS = """\
[project.optional-dependencies]
more = ["my-odd-name"]
[dependency-groups]
train = ["ns-one"]
"""


SIX = {
    "plain": ("alpha", "My.Odd_Name", "native", ""),
    "hashed": ("hashed.txt", ""),
    "extras": ("extras[table]", ""),
    "group": ("pyproject.toml[more]", "pyproject.toml:train", ""),
    "uv": ("uv.lock", ""),
    "constrained": ("alpha", "beta<2"),
}
"""What projects require, and last what constrains it."""


def test_the_bytes_of_six_locks(lock, indexes, root, wheelhouse):
    """A golden file: the same answers of a resolver always give the same bytes."""
    make_wheel(wheelhouse, "extras", metadata_extra=EXTRAS, requires=["ns-one"])
    make_wheel(wheelhouse, "native", tag="cp312-cp312-manylinux_2_17_x86_64")
    without_compression(wheelhouse)
    names = {"alpha": "1.0", "beta": "1.1", "cli_tool": "1.0"}
    wheels = {one: wheelhouse / f"{one}-{names[one]}-py3-none-any.whl" for one in names}
    digests = {name: digest_file(path) for name, path in wheels.items()}
    (root / "hashed.txt").write_text(HASHED.format_map(digests))
    write_project(root, '"alpha"', GROUPS)
    subprocess.run([*require_uv(), "lock", "-q"], cwd=root, check=True)
    texts = []
    for name, (*asked, constraint) in SIX.items():
        limits = [constraint] if constraint else []
        target = {"python": "3.12", "platform": "manylinux_2_28_x86_64"}
        made = lock(*asked, constraints=limits, **target)
        text = made.path.read_text().replace(indexes.usual.url.removesuffix("/simple"), "<index>")
        if name == "uv":  # whose lock has the index's port
            text = text.replace(str(made.spec_digest), "<digest>")
        texts.append(f"# {name}\n{text}")
        made.path.unlink()
    check_golden("locks.txt", "\n".join(texts))


WORKSPACE = """\
[dependency-groups]
dev = ["beta"]
[tool.uv]
override-dependencies = ["beta<2"]
[tool.uv.workspace]
members = ["packages/*"]
exclude = ["packages/no-*"]
[tool.ruff]
line-length = 100
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "asked"),
    [
        ("pyproject.toml", '"alpha"', '"alpha", "beta"', True),
        ("pyproject.toml", ">=3.10", ">=3.11", True),
        ("pyproject.toml", 'dev = ["beta"]', 'dev = ["alpha"]', True),
        ("pyproject.toml", "beta<2", "beta<3", True),
        ("packages/member/pyproject.toml", '"beta"', '"beta", "alpha"', True),
        ("uv.toml", "", 'prerelease = "allow"\n', True),
        ("pyproject.toml", "= 100", "= 99", False),
        ("packages/no-member/pyproject.toml", '"beta"', '"alpha"', False),
    ],
)
def test_uv_is_asked_again_when_what_its_lock_depends_on_has_changed(
    ask, root, file, old, new, *, asked
):
    (root / "packages").mkdir()
    write_project(root, '"alpha"', WORKSPACE)
    write_project(root / "packages" / "member", '"beta"', name="member")
    write_project(root / "packages" / "no-member", '"beta"', name="no-member")
    (root / "uv.toml").touch()
    (root / "uv.lock").write_text("version = 1\n")
    before = ask("uv.lock").digest
    changed = root / file
    text = changed.read_text()
    changed.write_text(text.replace(old, new) if old else new)
    assert (ask("uv.lock").digest != before) == asked


@pytest.mark.usefixtures("indexes")
def test_a_lock_of_uv_decides_alone(ask, root):
    with pytest.raises(ConfigError) as caught:
        ask("uv.lock", "alpha")
    assert "alpha beside uv.lock" in caught.value.context[0]
    assert "no such file" in caught.value.context[1]
    write_project(root, '"alpha"')
    subprocess.run([*require_uv(), "lock", "-q"], cwd=root, check=True)
    config = load.parse(
        {"environment": {"requirements": ["uv.lock"]}}, root=root, source=root / "stager.toml"
    )
    with pytest.raises(ConfigError, match="--upgrade has no effect") as caught:
        lock_project(config, ResolveOptions(upgrade=True), Recorder())
    assert "uv lock" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        ask("uv.lock", ".")
    assert "is no package for uv" in caught.value.context[0]


def test_the_block_of_a_script(lock, indexes, root, tmp_path):
    git_commit(own_backend(tmp_path / "from-git"))
    own_backend(tmp_path / "from-folder")
    table = f'requires-python = ">=3.10"\ndependencies = [{NEEDED}]\n'
    table += '[tool.uv]\noverride-dependencies = ["beta==1.0"]\n' + sources(indexes, tmp_path)
    block = "".join(f"# {line}\n" for line in ("/// script", *table.splitlines(), "///"))
    (root / "train.py").write_text(f"{block}print(1)\n")
    assert versions(lock("train.py")) == {**LOCKED, "beta": "1.0"}


def test_scripts_that_say_nothing_are_no_packages(ask, root):
    (root / "plain.py").write_text("print(1)\n")
    (root / "old.py").write_text('# /// script\n# requires-python = "<3.9"\n# ///\n')
    (root / "open.py").write_text('# /// script\n# dependencies = ["alpha"]\n')
    with pytest.raises(ConfigError) as caught:
        ask("plain.py", "old.py", "open.py")
    problems = "\n".join(caught.value.context)
    for said in ("plain.py is a file here", "requires-python is '<3.9'", "has no end"):
        assert said in problems


def test_an_index_that_asks_for_a_password(lock, ask, store, indexes, root, monkeypatch):
    private = Index(folder=indexes.extra.folder, user="me", password="s3cret/word")
    monkeypatch.setenv("UV_INDEX_MY_INDEX_USERNAME", private.user)
    monkeypatch.setenv("UV_INDEX_MY_INDEX_PASSWORD", private.password)
    with serve(private) as served:
        source = 'special = { index = "my-index" }\n[[tool.uv.index]]\nname = "my-index"\n'
        table = f'[tool.uv.sources]\n{source}url = "{served.url}"\nexplicit = true\n'
        write_project(root, '"special"', table)
        made = lock("pyproject.toml")
        assert versions(made) == {"beta": "2.0", "special": "1.0"}
        assert "s3cret" not in (root / "pylock.toml").read_text()
        wheels = WheelSource(spec=ask("pyproject.toml"), store=store, offline=False).fetch(made)
    assert [wheel.name for wheel in wheels] == ["beta", "special"]


def test_a_damaged_uv_lock_is_left_to_uv(ask, root):
    (root / "pyproject.toml").write_text('[project]\nname = "app"\nversion = "0"\n')
    dependencies = 'name = "app"\nsource = 3\ndev-dependencies = 3'
    for damage in ("package = 3", f"[[package]]\n{dependencies}", "manifest = 3"):
        (root / "uv.lock").write_text(f"version = 1\n{damage}\n")
        assert ask("uv.lock:dev").overridden == frozenset()


@pytest.mark.parametrize("line", ['members = ["/somewhere/*", "", "a**"]', "members = 3"])
def test_members_of_a_workspace_that_are_none(ask, root, line):
    more = f"[tool.uv.sources]\nother = {{ workspace = true }}\n[tool.uv.workspace]\n{line}\n"
    write_project(root, '"other"', more)
    assert ask("pyproject.toml").uv_project is not None


def test_a_project_that_names_itself_is_never_looked_for(lock, indexes, root, wheelhouse):
    """Beside settings of uv, which itself would take a stranger's package of that name."""
    make_wheel(wheelhouse, "my-proj", "3.0")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "my-proj"\nversion = "1"\ndependencies = ["alpha"]\n'
        '[project.optional-dependencies]\na = ["special"]\nall = ["my-proj[a]>=1"]\n'
        "never = [\"my-proj[a] ; sys_platform == 'win32'\"]\n"
        '[dependency-groups]\ng = ["my-proj[all]"]\nnone = ["my-proj[never]"]\n'
        f'[tool.uv]\nconstraint-dependencies = ["special<9"]\n'
        f'[[tool.uv.index]]\nname = "extra"\nurl = "{indexes.extra.url}"\n'
    )
    everything = {"alpha": "1.0", "beta": "7.0", "special": "1.0"}
    assert versions(lock("pyproject.toml[all]")) == everything
    assert versions(lock("pyproject.toml:g")) == everything
    assert versions(lock("pyproject.toml:none")) == {"alpha": "1.0", "beta": "7.0"}
