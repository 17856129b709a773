import os
import shutil
import subprocess
from textwrap import dedent

import pytest

from stager.config import load
from stager.core.errors import ConfigError
from stager.lock.indexes import Indexes
from stager.lock.spec import read_spec
from tests.support.wheelhouse import make_wheel


def problems(ask, *requirements, **more):
    with pytest.raises(ConfigError) as caught:
        ask(*requirements, **more)
    assert caught.value.hint
    return caught.value.context


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def project(folder, name="my-lib"):
    """Write a project, which nobody builds."""
    write(folder, "pyproject.toml", f'[project]\nname = "{name}"\nversion = "1.0"\n')
    write(folder, f"{name.replace('-', '_')}/__init__.py", "X = 1\n")
    return folder


def test_strings_are_normalised(ask):
    spec = ask("numpy >= 2,<3", 'My.Pkg[B,a] ;python_version<"4"', "numpy >= 2,<3")
    assert spec.requirements == ("numpy<3,>=2", 'my-pkg[a,b] ; python_version < "4"')


def test_a_requirement_file_as_pip_reads_it(ask, root, monkeypatch):
    monkeypatch.setenv("EXTRA", "more")
    monkeypatch.setenv("VERSION_OF_IT", "7")
    write(
        root,
        "requirements.in",
        """\
        # a comment
        alpha==1.0  # another
        beta \\
            >=2 \\
            ; python_version > "3"
        gamma==1 --hash=sha256:abc \\
            --hash=sha256:def
        odd@https://example.org/odd-1.0-py3-none-any.whl#egg=odd
        epsilon==${VERSION_OF_IT}
        -r sub/${EXTRA}.txt
        -c limits.txt
        --requirement=sub/last.txt
        """,
    )
    write(root, "sub/more.txt", "delta\n-r ../requirements.in\n-c more-limits.txt\n")
    write(root, "sub/more-limits.txt", "delta<9\n")
    write(root, "sub/last.txt", "last")
    write(root, "limits.txt", "\ufeffalpha<2\n-r sub/nested.txt\n")
    write(root, "sub/nested.txt", "beta<3\n")
    spec = ask("requirements.in", constraints=["gamma<2"])
    assert spec.requirements == (
        "alpha==1.0",
        'beta>=2 ; python_version > "3"',
        "gamma==1",
        "odd @ https://example.org/odd-1.0-py3-none-any.whl#egg=odd",
        "epsilon==7",
        "delta",
        "last",
    )
    # What a constraint file includes limits versions, too.
    assert sorted(spec.constraints) == ["alpha<2", "beta<3", "delta<9", "gamma<2"]


def test_paths_in_a_nested_file_start_at_the_project(ask, root):
    """As with pip and uv; where there is no such place, at the file's folder."""
    for folder in (root, root / "sub"):
        make_wheel(folder, "both", "1.0" if folder == root else "2.0")
        (folder / "links").mkdir()
        project(folder / "shared")
    project(root / "sub" / "lib")
    make_wheel(root / "sub", "own")
    (root / "links-of-all").mkdir()
    write(
        root,
        "sub/r.txt",
        "./both-1.0-py3-none-any.whl\n./own-1.0-py3-none-any.whl\n./shared\n./lib\n"
        "--find-links links\n--find-links links-of-all\n",
    )
    spec = ask("sub/r.txt")
    places = [text.rpartition("project/")[2] for text in spec.requirements]
    assert places == ["both-1.0-py3-none-any.whl", "sub/own-1.0-py3-none-any.whl"]
    assert [source.label for source in spec.local_projects] == ["shared", "sub/lib"]
    assert spec.indexes.find_links == (str(root / "sub/links"), str(root / "links-of-all"))


def test_what_is_no_requirement_file_is_refused_at_once(ask, root):
    os.mkfifo(root / "pipe.txt")
    why = "cannot read pipe.txt: is not a regular file"
    assert problems(ask, "pipe.txt") == (f"environment.requirements: {why}",)
    assert problems(ask, "numpy", constraints=["pipe.txt"]) == (f"environment.constraints: {why}",)
    (root / "plain").mkdir()
    for entry, said in (
        ("/dev/zero", "/dev/zero is neither a wheel nor an sdist"),
        ("./plain", "neither pyproject.toml nor setup.py"),
    ):
        (line,) = problems(ask, entry)
        assert said in line


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_encodings_of_a_requirement_file(ask, root, encoding):
    """As pip reads them: PowerShell writes UTF-16. The name of a file may have spaces."""
    text = f"# -*- coding: {encoding} -*-\nalpha==1  # d\u00e9j\u00e0 vu\n"
    (root / "odd name.txt").write_bytes(text.encode(encoding))
    assert ask("odd name.txt").requirements == ("alpha==1",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"# caf\xe9\nalpha\n", "save it as UTF-8, or begin it with the encoding that it has"),
        (b"# coding: nonsense\nalpha\n", "unknown encoding: nonsense"),
        (b"-e git+https://example.org/x.git", "write it without -e: a wheel of its commit"),
        (b"numpy @ file:///croot/numpy_17/work", "`pip list --format=freeze` writes versions"),
        (b"alpha=1.0=py311h06a4308_0", "one = is conda's notation; write package==version"),
        (b"alpha --no-binary alpha", "--no-binary after a requirement is not supported"),
        (b"--no-deps\nalpha", "option --no-deps not recognized"),
        (b"--index-url https://example.org/simple alpha", "alpha belongs on a line of its own"),
        (b"alpha --config-settings=a=b", "build the wheel with it (`pip wheel`)"),
    ],
)
def test_lines_that_other_tools_write(ask, root, text, expected):
    (root / "r.txt").write_bytes(text)
    (problem,) = problems(ask, "r.txt")
    assert expected in problem


def test_index_options(ask, root):
    (root / "wheels").mkdir()
    write(
        root,
        "deep/requirements.txt",
        """\
        -i https://${USER_NAME}:${PASSWORD}@one.example/simple
        --extra-index-url https://two.example/simple
        --extra-index-url=https://three.example/simple
        -f ../wheels
        --find-links https://files.example/
        --trusted-host two.example
        --only-binary :all:
        --no-binary=gamma,delta
        --pre
        --prefer-binary
        alpha
        """,
    )
    assert ask("deep/requirements.txt").indexes == Indexes(
        index_url="https://${USER_NAME}:${PASSWORD}@one.example/simple",
        extra_index_urls=("https://two.example/simple", "https://three.example/simple"),
        find_links=(str(root / "wheels"), "https://files.example/"),
        trusted_hosts=("two.example",),
        only_binary=(":all:",),
        no_binary=("gamma", "delta"),
        pre=True,
    )


def test_all_problems_with_file_and_line(ask, root):
    write(
        root,
        "a.txt",
        """\
        good==1
        bad requirement
        -e ./editable
        --editable=git+https://example.org/x.git

        fine --global-option=x
        -r missing.txt
        -r https://example.org/r.txt
        --unheard-of thing
        -r
        ./nowhere
        """,
    )
    write(root, "limits.txt", "x y\n")
    found = problems(ask, "a.txt", "b.txt", "-e .", constraints=["limits.txt"])
    lines = [
        *(f"a.txt:{line}" for line in (3, 4, *range(6, 11))),
        *["environment.requirements"] * 2,
    ]
    lines += ["a.txt:2", "a.txt:11", "limits.txt:1"]
    assert [line.partition(": ")[0] for line in found] == lines
    assert "which the nodes do not have" in found[0]
    assert found[3].endswith("cannot read missing.txt: No such file or directory")
    assert "cannot read b.txt" in found[7]
    assert "which the nodes do not have" in found[8]


PYPROJECT = """\
[project]
name = "The-Project"
dependencies = ["alpha>=1"]
[project.optional-dependencies]
train = ["beta"]
plot = ["gamma"]
All = ["the.project[train,plot]", "delta"]
marked = ["the_project[train] ; sys_platform == 'linux'", "The-Project[marked]>=1"]
circle = ["the-project[circle,train] ; sys_platform == 'linux'"]
[dependency-groups]
itself = ["the-project[plot]>=1 ; python_version > '3'", "ruff"]
lint = ["ruff"]
dev = ["pytest", {include-group = "lint"}]
loop = [{include-group = "loop"}]
"""


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("pyproject.toml", ("alpha>=1",)),
        ("pyproject.toml[train]", ("alpha>=1", "beta")),
        ("pyproject.toml[Train, plot]", ("alpha>=1", "beta", "gamma")),
        ("pyproject.toml[all]", ("alpha>=1", "gamma", "beta", "delta")),
        ("pyproject.toml[marked]", ("alpha>=1", "beta")),
        ("pyproject.toml[circle]", ("alpha>=1", "beta")),
        ("pyproject.toml:itself", ("alpha>=1", "gamma", "ruff")),
        ("pyproject.toml:dev", ("pytest", "ruff")),
        ("./pyproject.toml:lint,dev", ("ruff", "pytest")),
    ],
)
def test_pyproject(ask, root, entry, expected):
    write(root, "pyproject.toml", PYPROJECT)
    assert ask(entry).requirements == expected


def test_pyproject_problems(ask, root):
    write(root, "pyproject.toml", PYPROJECT)
    write(root, "dyn/pyproject.toml", "[project]\nname='x'\ndynamic=['dependencies']\n")
    write(root, "odd/pyproject.toml", "[project]\nname='x'\ndependencies='alpha'\n")
    found = problems(
        ask,
        "pyproject.toml[none]",
        "pyproject.toml:none",
        "pyproject.toml:loop",
        "dyn/pyproject.toml",
        "odd/pyproject.toml",
        "gone/pyproject.toml",
    )
    assert "no extra 'none'; there are All, circle, marked, plot, train" in found[0]
    assert "no dependency group 'none'; there are dev, itself, lint, loop" in found[1]
    assert "loop includes itself" in found[2]
    assert "dynamic" in found[3]
    assert "must be a list of strings" in found[4]
    assert "No such file" in found[5]
    assert len(found) == 6


def test_a_folder_is_a_source(ask, root):
    project(root / "mylib")
    for entry in (
        "./mylib",
        "mylib/",
        str(root / "mylib"),
        (root / "mylib").as_uri(),
        f"my-lib @ {(root / 'mylib').as_uri()}",
        "my-lib @ file:./mylib",
    ):
        spec = ask(entry)
        assert spec.requirements == ()
        (source,) = spec.local_projects
        assert source.requirement == str(root / "mylib")
        assert source.label == "mylib"
        assert not source.moving
    (source,) = ask('./mylib[b, a] ; python_version > "3"').local_projects
    assert (source.suffix, source.marker) == ("[a,b]", 'python_version > "3"')


def test_files_and_urls(ask, root):
    wheel = make_wheel(root / "wheels", "Some.Thing", "2.0")
    sdist = write(root, "dist/thing-1.0.tar.gz", "not looked into yet")
    commit = "0" * 40
    spec = ask(
        f"./wheels/{wheel.name}",
        "dist/thing-1.0.tar.gz",
        f"git+https://user:secret@example.org/x.git@{commit}",
        "named @ git+https://example.org/y.git@main",
        "remote @ https://example.org/remote-1.0.tar.gz",
        "https://example.org/far-1.0-py3-none-any.whl",
    )
    assert spec.requirements == (
        f"some-thing @ {wheel.as_uri()}",
        "far @ https://example.org/far-1.0-py3-none-any.whl",
    )
    file, pinned, branch, remote = spec.local_projects
    assert file.requirement == str(sdist)
    assert (pinned.label, pinned.moving) == (f"git+https://example.org/x.git@{commit}", False)
    assert "secret" in pinned.requirement  # pip needs it; only the label is written down
    assert branch.requirement == "named @ git+https://example.org/y.git@main"
    assert branch.moving
    assert remote.moving


def test_the_digest_follows_what_matters(ask, root):
    base = ask("alpha").digest
    for text in ("alpha\n", "# a comment\nalpha\n"):
        write(root, "r.txt", text)
        assert ask("r.txt").digest == base  # where a requirement stands makes no difference
    others = {
        ask("alpha>1").digest,
        *(
            ask("alpha", **{key: value}).digest
            for key, value in (
                ("constraints", ["alpha<2"]),
                ("python", "3.12"),
                ("platform", "manylinux_2_17_x86_64"),
                ("torch_backend", "cpu"),
            )
        ),
    }
    write(root, "r.txt", "--extra-index-url https://example.org/simple\nalpha\n")
    assert len({base, *others, ask("r.txt").digest}) == 7


def test_the_digest_does_not_depend_on_passwords_or_places(ask, root, tmp_path):
    project(root / "mylib")
    make_wheel(root / "wheels", "thing")
    write(root, "r.txt", "-i https://u:one@example.org/simple\n-f wheels\n./mylib\n")
    entries = ["r.txt", "wheels/thing-1.0-py3-none-any.whl"]
    first = ask(*entries).digest
    moved = tmp_path / "elsewhere"
    shutil.copytree(root, moved)
    write(moved, "r.txt", "-i https://u:two@example.org/simple\n-f wheels\n./mylib\n")
    table = {"environment": {"requirements": entries}}
    again = read_spec(load.parse(table, root=moved, source=moved / "stager.toml"))
    assert again.digest == first
    make_wheel(root / "wheels", "thing", files={"thing.py": "changed = 1\n"})
    assert ask(*entries).digest != first


def test_the_digest_of_a_folder_is_that_of_its_sources(ask, root):
    lib = project(root / "mylib")
    first = ask("./mylib").digest
    for left_behind in ("build/lib/x.py", "my_lib.egg-info/PKG-INFO", "my_lib/__pycache__/x.pyc"):
        write(lib, left_behind, "x")
    write(lib, "pylock.toml", "a lock is made from the sources, not the other way round")
    write(lib, "env/pyvenv.cfg", "")
    write(lib, "env/lib/x.py", "")
    assert ask("./mylib").digest == first
    write(lib, "my_lib/more.py", "")
    assert ask("./mylib").digest != first


@pytest.mark.needs("git")
def test_what_git_ignores_does_not_count(ask, root):
    lib = project(root / "mylib")
    for argv in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *argv], cwd=lib, check=True)
    write(lib, ".gitignore", "runs/\n")
    first = ask("./mylib").digest
    write(lib, "runs/big.bin", "x")
    assert ask("./mylib").digest == first
    write(lib, "new.py", "not added yet, but it would be")
    assert ask("./mylib").digest != first


def test_outputs_and_the_offline_root_inside_the_project_do_not_count(root):
    project(root)
    table = {
        "environment": {"requirements": ["."], "offline-root": "store"},
        "project": {"outputs": ["out"]},
    }
    settings = load.parse(table, root=root, source=root / "stager.toml")
    first = read_spec(settings)
    assert first.local_projects[0].label == "."
    write(root, "out/metrics.json", "{}")
    write(root, "store/wheels/x", "")
    assert read_spec(settings).digest == first.digest


def test_a_given_lock_stands_alone(ask, root):
    path = write(root, "pylock.lab.toml", "x = 1\n")
    spec = ask("pylock.lab.toml")
    assert spec.pylock == path
    assert spec.requirements == ()
    write(root, "pylock.lab.toml", "x = 2\n")
    assert ask("pylock.lab.toml").digest != spec.digest
    (line,) = problems(ask, "pylock.lab.toml", "numpy")
    assert "must stand alone" in line
    (line,) = problems(ask, "pylock.gone.toml")
    assert "no such file" in line
