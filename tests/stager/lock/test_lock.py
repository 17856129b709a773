import logging
import shutil
import subprocess

import pytest
from packaging.pylock import Pylock

from bundle.system.processes import CompletedCommand
from stager.core import toml
from stager.core.errors import ConfigError, ResolveError, SpaceError, StagerError
from stager.core.store import Store, digest_file
from stager.core.values import Target
from stager.lock.indexes import Indexes
from stager.lock.lock import ResolveOptions, can_reach_index, make_lock
from stager.lock.pip import Pip, condense
from stager.lock.pylock import read_lock
from stager.wheels import WheelSource
from tests.support.index_server import Index, serve
from tests.support.locks import BOTH, UV_FIRST, fails, versions
from tests.support.sources import git_commit, own_backend, own_sdist
from tests.support.wheelhouse import make_wheel

HERE = Target.from_host()


# --- what a lock holds ---------------------------------------------------------------------------


@pytest.mark.usefixtures("index_env")
def test_both_resolvers_give_the_same_file(lock, root, wheelhouse):
    """By PEP 751, so that others can read it."""
    texts = []
    for resolver in ("uv", "pip-tools"):
        made = lock("alpha", "my-odd.name", constraints=["beta<2"], resolver=resolver)
        assert versions(made) == {"alpha": "1.0", "beta": "1.1", "my-odd-name": "1.0"}
        texts.append(made.path.read_bytes())
    assert texts[0] == texts[1]
    beta = made.files[1]
    file = wheelhouse / "beta-1.1-py3-none-any.whl"
    assert (beta.path, beta.url, beta.size) == (file, None, file.stat().st_size)
    assert beta.sha256 == digest_file(file)

    data = toml.read(made.path)
    document = Pylock.from_dict(data)
    assert (str(document.lock_version), document.created_by) == ("1.0", "stager")
    chosen = document.select(environment=HERE.environment(), tags=list(HERE.tags()))
    assert [package.name for package, _ in chosen] == ["alpha", "beta", "my-odd-name"]
    ours = data["tool"]["stager"]
    assert (ours["python"], ours["platform"]) == (HERE.python, HERE.platform)
    assert not list(root.glob(".pylock*"))  # the temporary sibling is gone


# --- other targets -------------------------------------------------------------------------------


def test_pip_tools_refuses_another_python(lock):
    error = fails(lock, "alpha", python="3.99", resolver="pip-tools")
    assert "only for the Python and machine it runs on" in error.message
    assert "uv" in error.hint


def test_an_older_libc_gets_the_older_wheel(lock, index_env, wheelhouse):
    machine, tag = HERE.machine, HERE.python_tag
    for libc in ("manylinux_2_17", "manylinux_2_28"):
        make_wheel(wheelhouse, "fast", tag=f"{tag}-{tag}-{libc}_{machine}")
    old = lock("fast", platform=f"manylinux_2_17_{machine}")
    assert "manylinux_2_17" in old.files[0].filename
    new = lock("fast", platform=f"manylinux_2_28_{machine}")
    assert "manylinux_2_28" in new.files[0].filename


# --- no solution ---------------------------------------------------------------------------------


@BOTH
def test_all_reasons_at_once(lock, index_env, wheelhouse):
    make_wheel(wheelhouse, "wants-old", requires=["beta<1.1"])
    make_wheel(wheelhouse, "needs-ghost", requires=["ghost-of-a-package"])
    asked = ("no-such-thing", "cli-tool==9", "alpha", "wants-old", "needs-ghost", "ns-one")
    error = fails(lock, *asked)
    told = "\n".join(error.context)
    assert "4 problems" in error.message
    assert len(error.context) == 4
    assert all("\n" not in line for line in error.context)
    assert "no-such-thing" in told
    assert "cli-tool" in told
    assert "ghost-of-a-package" in told
    conflict = next(line for line in error.context if "wants-old" in line)
    assert "alpha" in conflict
    assert "beta" in conflict
    assert "ns-one" not in told
    assert error.hint


@BOTH
def test_no_wheel_for_the_target_lists_all_with_what_exists(lock, index_env, wheelhouse, resolver):
    make_wheel(wheelhouse, "mac-only", "1.0", tag="cp311-cp311-macosx_11_0_arm64")
    make_wheel(wheelhouse, "mac-only", "1.1", tag="cp311-cp311-macosx_12_0_arm64")
    make_wheel(wheelhouse, "old-only", "3.0", tag="cp27-cp27mu-manylinux1_x86_64")
    make_wheel(wheelhouse, "old-only", "3.0", tag="cp27-cp27m-win32")
    make_wheel(wheelhouse, "parent", requires=["mac-only", "old-only"])
    where = f"no wheel for {HERE.python_tag} on {HERE.platform}"
    for asked in (["mac-only", "alpha", "old-only==3.0"], ["parent", "alpha"])[
        : 1 + (resolver == "uv")
    ]:
        error = fails(lock, *asked)
        assert sorted(error.context) == [
            f"mac-only 1.1: {where}; there are cp311-cp311-macosx_12_0_arm64",
            f"old-only 3.0: {where}; there are cp27-cp27m-win32, cp27-cp27mu-manylinux1_x86_64",
        ]


@BOTH
def test_an_index_that_does_not_answer(lock, only_index, monkeypatch):
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    only_index("http://me:hidden@127.0.0.1:9/simple")
    error = fails(lock, "alpha")
    assert "cannot be reached" in error.message
    assert "hidden" not in "".join(error.context)


# --- PyTorch's own index -------------------------------------------------------------------------


@pytest.mark.usefixtures("index_env")
@pytest.mark.parametrize("backend", ["cpu", "cu126", "none"])
@pytest.mark.parametrize("answers", [True, False])
def test_the_torch_index_is_added_when_it_answers(lock, backend, answers):
    asked = []

    def reachable(url):
        asked.append(url)
        return answers

    made = lock("alpha", torch_backend=backend, reachable=reachable)
    urls = [] if backend == "none" else [f"https://download.pytorch.org/whl/{backend}"]
    assert asked == [f"{url}/" for url in urls]
    assert list(made.indexes.extra_index_urls) == (urls if answers else [])


DEAD = "http://127.0.0.1:9/whl/"


def test_a_torch_index_that_gives_no_answer_is_named(lock, index_env, wheelhouse, monkeypatch):
    monkeypatch.setattr("stager.lock.lock.TORCH_INDEX", DEAD)
    make_wheel(wheelhouse, "triton")
    make_wheel(wheelhouse, "torch", "2.13.0", requires=["triton"])
    make_wheel(wheelhouse, "accelerated", requires=["torch"])
    for requirement, backend, said in (
        ("torch", "cpu", "the lock pulls 1 CUDA packages"),
        ("torch==2.13.0+cpu", "cpu", "the requirements have no solution"),
        ("accelerated", "cu126", "only torch 2.13.0 is available, which is a different build"),
    ):
        error = fails(lock, requirement, torch_backend=backend, reachable=can_reach_index)
        assert said in error.message
        left_out = f"{DEAD}{backend}, which environment.torch-backend adds, did not answer"
        assert left_out in error.context[-1]
        assert "where that index can be reached" in error.hint
    make_wheel(wheelhouse, "torch", "2.13.0+cu126")
    made = lock("accelerated", torch_backend="cu126", reachable=can_reach_index)
    assert versions(made)["torch"] == "2.13.0+cu126"  # as good, wherever it comes from
    error = fails(lock, "torch==1.13.1+cu117")
    assert "torch==1.13.1+cu117 is on PyTorch's own index: set" in error.hint
    assert 'environment.torch-backend = "cu117"' in error.hint


# --- sources -------------------------------------------------------------------------------------


def test_a_local_project_is_built_once_for_each_content(lock, ask, index_env, root, store):
    lib = own_backend(root / "my-lib").rename(root / "my lib")
    text = (lib / "backend.py").read_text()
    extra = r"\nVersion: 1.0\nProvides-Extra: more\nRequires-Dist: alpha ; extra == 'more'"
    (lib / "backend.py").write_text(text.replace(r"\nVersion: 1.0", extra))
    there = sorted(lib.iterdir())
    first = lock("./my lib[more]", "beta<2")
    assert versions(first) == {"alpha": "1.0", "beta": "1.1", "my-lib": "1.0"}
    wheel = first.files[2]
    assert wheel.path.is_relative_to(store.built)
    assert first.sources == ((wheel.filename, "my lib"),)
    assert sorted(lib.iterdir()) == there
    stamp = wheel.path.stat().st_mtime_ns
    assert lock("./my lib").files[0].path.stat().st_mtime_ns == stamp
    (lib / "my_lib.py").write_text("X = 2\n")
    assert not first.is_current(ask("./my lib[more]", "beta<2"))
    assert lock("./my lib").files[0].sha256 != wheel.sha256


@pytest.mark.needs("git")
def test_from_version_control(lock, index_env, tmp_path):
    """A branch is a pin: the lock holds its commit, and the folder in the repository."""
    repo = tmp_path / "repo"
    inner = own_backend(repo / "below" / "from-git")
    commit = git_commit(repo)
    asked = f"git+file://{repo}@main#subdirectory=below/from-git"
    for requirement in (asked, f"from-git @ {asked}"):
        made = lock(requirement)
        assert versions(made) == {"from-git": "1.0"}
        label = f"git+file://{repo}@{commit}#subdirectory=below/from-git"
        assert made.sources == (("from_git-1.0-py3-none-any.whl", label),)
        assert (made.git[0].revision, made.git[0].commit) == ("main", commit)
        (inner / "more.py").write_text(f"X = {len(requirement)}\n")
        git_commit(repo)


@pytest.mark.needs("git")
def test_behind_a_gap_the_wheel_of_a_mirror_stands_for_the_repository(
    lock, ask, store, tmp_path, monkeypatch
):
    """A new lock, and a build from the lock, where neither the repository nor its build is."""
    own_backend(tmp_path / "repo" / "from-git")
    git_commit(tmp_path / "repo")
    asked = f"from-git @ git+file://{tmp_path}/repo@main#subdirectory=from-git"
    made = lock(asked)
    wheel = made.files[0].path
    mirror = tmp_path / "mirror"
    (mirror / "simple").mkdir(parents=True)
    wheel.rename(mirror / wheel.name)
    shutil.rmtree(tmp_path / "repo")
    monkeypatch.setenv("PIP_INDEX_URL", (mirror / "simple").as_uri())
    one = Store(tmp_path / "one")
    (fetched,) = WheelSource(spec=ask(asked), store=one, offline=False).fetch(made)
    assert fetched.sha256 == made.files[0].sha256
    shutil.rmtree(store.root)
    again = lock(asked)
    sha256 = made.files[0].sha256
    assert (again.files[0].sha256, again.git, again.sources) == (sha256, made.git, made.sources)


@pytest.mark.needs("git")
def test_a_version_that_git_knows(lock, index_env, tmp_path):
    """The copy that is built has the history; what is left out of it is no change."""
    folder = own_backend(tmp_path / "repo" / "of-git")
    backend = (folder / "backend.py").read_text()
    for before, after in (("}-1.0", "}-{VERSION}"), ("\\nVersion: 1.0", "\\nVersion: {VERSION}")):
        backend = backend.replace(before, after)
    asked = ["git", "describe", "--tags", "--dirty=.dirty"]
    known = f"import subprocess\nVERSION = subprocess.check_output({asked}, text=True).strip()\n"
    (folder / "backend.py").write_text(known + backend)
    text = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        text.replace('version = "1.0"', 'dynamic = ["version"]  # git describe')
    )
    (tmp_path / "repo" / "dist").mkdir()
    (tmp_path / "repo" / "dist" / "tracked.txt").write_text("left out of a copy")
    git_commit(tmp_path / "repo")
    subprocess.run(["git", "tag", "3.1"], cwd=folder, check=True)
    assert versions(lock(str(folder))) == {"of-git": "3.1"}


def test_what_the_target_does_not_need_is_not_fetched(lock, index_env, root):
    nowhere = "https://127.0.0.1:9/gone-1.0"
    (root / "r.txt").write_text(
        f"gone @ {nowhere}.tar.gz ; sys_platform == 'win32'\n"
        f"gone @ {nowhere}-py3-none-any.whl ; python_version < '3'\nbeta\n"
    )
    assert versions(lock("r.txt")) == {"beta": "2.0"}


def test_a_project_for_another_python_is_built(lock, index_env, tmp_path):
    """By that Python where it is here; else by this one, for a wheel that is for any."""
    folder = own_backend(tmp_path / "later")
    with (folder / "pyproject.toml").open("a") as file:
        file.write('requires-python = ">=3.14"\n')
    made = lock(str(folder), python="3.14", platform=HERE.platform)
    assert versions(made) == {"later": "1.0"}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_url_with_a_password_can_be_fetched(lock, index_env, tmp_path, store, ask, kind):
    """The lock has neither the password nor the token, which the requirement keeps."""
    files = tmp_path / "elsewhere"
    files.mkdir()
    file = own_sdist(files, "gamma") if kind == "sdist" else make_wheel(files, "gamma")
    with serve(Index(folder=files, user="u", password="secret")) as index:
        text = f"gamma @ http://u:secret@127.0.0.1:{index.port}/files/{file.name}?token=hidden"
        made = lock(text)
        for word in ("secret", "hidden"):
            assert word not in made.path.read_text()
        shutil.rmtree(store.built)
        with store.lock():
            (wheel,) = WheelSource(spec=ask(text), store=store, offline=False).fetch(made)
    assert wheel.name == "gamma"


def test_sources_that_cannot_be_built_are_all_named(lock, index_env, root):
    for name in ("one", "two"):
        (root / name).mkdir()
        text = "[build-system]\nrequires = ['no-such-backend']\n"
        (root / name / "pyproject.toml").write_text(text)
    broken = own_backend(root / "three")
    (broken / "backend.py").write_text("def build_wheel(*rest):\n    raise OSError('no room')\n")
    with pytest.raises(ResolveError) as caught:
        lock("./one", "./two", "./three")
    context = caught.value.context
    named = [line for line in context if not line.startswith("  | ")]
    assert [line.partition(":")[0] for line in named] == ["one", "two", "three"]
    assert "no-such-backend" in context[0]
    assert context[-1].endswith("| OSError: no room"), "the end of the build"


# --- a lock the user brings ----------------------------------------------------------------------

GIVEN = """\
lock-version = "1.0"
created-by = "someone"

[[packages]]
name = "alpha"
version = "1.0"
wheels = [{ path = "wheelhouse/alpha-1.0-py3-none-any.whl", hashes = { sha256 = "ALPHA" } }]

[[packages]]
name = "fast"
version = "1.0"
wheels = [
    { url = "https://example.org/fast-1.0-cp310-cp310-manylinux_2_17_x86_64.whl", size = 1, hashes = { sha256 = "ONE" } },
    { url = "https://example.org/fast-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", size = 2, hashes = { sha256 = "TWO" } },
]

[[packages]]
name = "colorama"
version = "1.0"
marker = "sys_platform == 'win32'"
wheels = [{ url = "https://example.org/colorama-1.0-py3-none-any.whl", hashes = { sha256 = "ONE" } }]
"""  # noqa: E501


@pytest.fixture
def given(root, wheelhouse):
    digest = digest_file(wheelhouse / "alpha-1.0-py3-none-any.whl")
    text = GIVEN.replace("ALPHA", digest).replace("ONE", "1" * 64).replace("TWO", "2" * 64)
    path = root / "pylock.lab.toml"
    path.write_text(text.replace("wheelhouse/", f"{wheelhouse}/"))
    return path


def test_a_given_lock_is_taken_as_it_is(lock, given, wheelhouse, ask, store):
    """Also at the lock's own place, where nothing is written."""
    target = {"python": "3.12", "platform": "manylinux_2_28_x86_64"}
    made = lock(given.name, **target)
    assert versions(made) == {"alpha": "1.0", "fast": "1.0"}
    alpha, fast = made.files
    assert alpha.path == wheelhouse / "alpha-1.0-py3-none-any.whl"
    assert fast.sha256 == "2" * 64
    assert fast.url == "https://example.org/fast-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"

    before, spec = given.read_bytes(), ask(given.name, **target)
    made = make_lock(spec, path=given, store=store, options=ResolveOptions())
    assert given.read_bytes() == before
    read = read_lock(given, spec.target)
    assert (read.spec_digest, versions(read)) == (None, versions(made))
    assert read.is_current(spec)


def test_a_given_lock_without_files_for_the_target(lock, given, ask):
    target = {"python": "3.13", "platform": "manylinux_2_28_x86_64"}
    error = fails(lock, given.name, **target)
    expected = (
        "fast 1.0: no wheel for cp313 on manylinux_2_28_x86_64; there are "
        "cp310-cp310-manylinux_2_17_x86_64, cp312-cp312-manylinux_2_17_x86_64",
    )
    assert error.context == expected
    with pytest.raises(ResolveError) as caught:
        read_lock(given, ask(given.name, **target).target)
    assert caught.value.context == expected


# --- offline -------------------------------------------------------------------------------------


@BOTH
def test_offline_only_the_store_counts(lock, store, index_env):
    make_wheel(store.wheels, "alpha", requires=["beta"])
    error = fails(lock, "alpha", offline=True)  # though the configured folder has beta
    assert "beta" in "".join(error.context)
    assert "offline root" in error.hint
    make_wheel(store.wheels, "beta", "1.0")
    made = lock("alpha", offline=True)
    assert versions(made) == {"alpha": "1.0", "beta": "1.0"}


# --- indexes and passwords -----------------------------------------------------------------------


@pytest.fixture
def index(wheelhouse, only_index):
    """An index with a password, which is not given; pip's own configuration is silenced."""
    only_index("")
    with serve(Index(folder=wheelhouse, user="me", password="s3cret-pass")) as running:
        yield running


@BOTH
def test_passwords_of_pips_configuration_stay_out(lock, index, root, monkeypatch, caplog):
    monkeypatch.setenv("PIP_INDEX_URL", index.url_with_password)
    caplog.set_level(logging.DEBUG)
    made = lock("alpha")
    assert versions(made) == {"alpha": "1.0", "beta": "2.0"}
    assert made.files[0].url == f"http://127.0.0.1:{index.port}/files/alpha-1.0-py3-none-any.whl"
    # A HEAD request without the password is refused: the size came by way of pip.
    assert made.files[0].size == (index.folder / "alpha-1.0-py3-none-any.whl").stat().st_size
    error = fails(lock, "alpha", "no-such-thing")
    told = caplog.text + error.message + "".join(error.context)
    assert "start: " in told
    assert "s3cret-pass" not in told
    assert "s3cret-pass" not in (root / "pylock.toml").read_text()


@UV_FIRST
def test_an_index_that_refuses_us(lock, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", index.url_with_password.replace("s3cret", "wr0ng"))
    error = fails(lock, "alpha")
    assert "refuses" in error.message
    assert "401" in error.context[0]
    assert "wr0ng" not in error.context[0]


def test_passwords_in_requirement_files_stay_out(lock, index, root, caplog, monkeypatch):
    """Written there, or taken from the environment; the names of variables tell nothing."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("INDEX_PASSWORD", "s3cret-pass")
    monkeypatch.setenv("INDEX_USER", "me")
    by_name = index.url.replace("//", "//${INDEX_USER}:${INDEX_PASSWORD}@")
    for url, kept in ((index.url_with_password, index.url), (by_name, by_name)):
        (root / "r.txt").write_text(f"--index-url {url}\nalpha\n")
        assert lock("r.txt").indexes.index_url == kept
        text = (root / "pylock.toml").read_text()
        assert kept in text
        assert "s3cret-pass" not in text + caplog.text


def test_an_index_without_digests_or_lengths(lock, index, monkeypatch):
    index.user, index.hashes, index.lengths = "", False, False
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    made = lock("alpha")
    for file in made.files:
        served = index.folder / file.filename
        assert file.sha256 == digest_file(served)
        assert file.size == served.stat().st_size


def test_a_version_that_only_another_index_has(lock, index, tmp_path, monkeypatch):
    """The index that counts is named, the one that does not, and the setting; one each line."""
    make_wheel(tmp_path / "more", "beta", "3.0")
    with serve(Index(folder=tmp_path / "more")) as second:
        monkeypatch.setenv("PIP_INDEX_URL", index.url_with_password)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", second.url)  # uv asks it before the other
        with pytest.raises(ResolveError) as caught:
            lock("beta<3")
        (_, *more) = caught.value.context
        assert more == [
            f"beta was looked for only on {second.url}, the first index that has one",
            f"beta was not looked for on {index.url}",
        ]
        remedy = 'set environment.index-strategy = "unsafe-best-match" to search all indexes'
        assert caught.value.hint.startswith(f"{remedy}; check the names")


# --- reading -------------------------------------------------------------------------------------


HEAD = 'lock-version = "1.0"\ncreated-by = "x"\n'
NAMED = '[[packages]]\nname = "a"\n'
PACKAGE = f'{NAMED}version = "1"\n'


def one_wheel(hashes='sha256 = "0"', url="https://x/a-1-py3-none-any.whl", name=""):
    return f'wheels = [{{{name}url = "{url}", hashes = {{{hashes}}}}}]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a lock that can be read"),
        ("garbage\n", "line 1"),
        (HEAD.replace("1.0", "9.0") + "packages = []\n", "not supported"),
        (HEAD.replace("x", "stager") + "[tool.stager]\npython = 3\n", "damaged"),
        (
            HEAD + NAMED + '[packages.vcs]\ntype = "git"\nurl = "u"\ncommit-id = "c"\n',
            "version control",
        ),
        (HEAD + PACKAGE + one_wheel('md5 = "0"'), "no sha256"),
        (HEAD + PACKAGE + one_wheel(), "not a sha256"),
        (HEAD + 'requires-python = "<3"\n' + PACKAGE + one_wheel(), "is not for Python"),
        (HEAD + (PACKAGE + one_wheel()) * 2, "more than one file"),
        (HEAD + PACKAGE + "marker = \"sys_platform ~= 'x'\"\n" + one_wheel(), "pylock.toml: a: "),
        (
            HEAD + PACKAGE + one_wheel(url="https://[x/", name='name = "a-1-py3-none-any.whl", '),
            "pylock.toml: a: Invalid IPv6 URL",
        ),
        (
            HEAD + PACKAGE + 'archive = {url = "https://x/..%2F..%2Fa-1.tar.gz", '
            'hashes = {sha256 = "0"}}\n',
            "is not the name of a file",
        ),
    ],
)
def test_a_lock_that_cannot_be_used(tmp_path, text, expected):
    path = tmp_path / "pylock.toml"
    path.write_text(text)
    with pytest.raises(StagerError) as caught:
        read_lock(path, HERE)
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


# --- the real index ------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.slow
def test_the_real_index(lock, root):
    """Whatever other indexes this machine's pip knows: all of them count."""
    texts = []
    for resolver in ("uv", "pip-tools"):
        asked = ("colorama==0.4.6", "markupsafe==3.0.2")
        made = lock(*asked, index_strategy="unsafe-best-match", resolver=resolver)
        assert versions(made) == {"colorama": "0.4.6", "markupsafe": "3.0.2"}
        assert all(file.size for file in made.files)
        texts.append({(file.filename, file.sha256, file.size) for file in made.files})
    assert texts[0] == texts[1]


# --- causes ---


def test_of_a_traceback_of_pip_the_last_error_is_shown_and_a_full_disk_is_named(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n    ^^^\n'
    said = f"ERROR: Exception:\n{trace}OSError: first\n\nDuring handling, another:\n\n{trace}"
    said += "OSError: [Errno 28] No space left on device: '/small/pip-unpack-1/x.whl'\n"
    assert condense(said) == said.splitlines()[-1]

    def pip(argv, **_):
        return CompletedCommand(tuple(argv), 2, "", said)

    full = Pip(target=Target.from_host(), indexes=Indexes(), scratch=tmp_path, run=pip)
    with pytest.raises(SpaceError, match="pip has no space left") as caught:
        full.download(["x"], tmp_path)
    assert caught.value.context == (said.splitlines()[-1],)


def test_an_address_without_a_file_is_not_called_unreachable(lock, index_env, wheelhouse):
    with serve(Index(folder=wheelhouse)) as index:
        url = f"http://127.0.0.1:{index.port}/files/gone-1.0-py3-none-any.whl"
        error = fails(lock, f"gone @ {url}")
    assert "could not resolve" in error.message
    assert url in "".join(error.context)


# --- settings of pip and uv ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resolver", "variable"),
    [("uv", "PIP_CONSTRAINT"), ("uv", "UV_CONSTRAINT"), ("pip-tools", "PIP_CONSTRAINT")],
)
def test_constraints_of_the_configuration_count(
    lock, index_env, root, monkeypatch, resolver, variable
):
    """Whatever directory the resolver works in: their paths start at the user's."""
    (root / "limits.txt").write_text("beta<2\n")
    (root / "more.txt").write_text("gamma<9\n")
    monkeypatch.chdir(root)
    monkeypatch.setenv(variable, f"limits.txt {root / 'more.txt'}")
    assert versions(lock("beta")) == {"beta": "1.1"}


def test_hashes_that_the_configuration_requires(lock, index_env, root, monkeypatch):
    (root / "pip.conf").write_text("[install]\nrequire-hashes = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(root / "pip.conf"))
    assert "pip's configuration requires a hash" in fails(lock, "beta").message


# --- hashes in requirement files -----------------------------------------------------------------


def test_a_file_that_the_hashes_rule_out_is_refused(lock, index_env, wheelhouse, root):
    """As pip has it: the lab's build of a version is not the one that a stranger's index offers."""
    good = digest_file(wheelhouse / "beta-2.0-py3-none-any.whl")
    (root / "r.txt").write_text(f"beta==2.0 \\\n  --hash=sha256:{'0' * 64}\n")
    error = fails(lock, "r.txt")
    assert "beta-2.0-py3-none-any.whl: its sha256 is " + good in error.context[0]
    assert "--index-url" in error.hint
    assert not (root / "pylock.toml").exists()
    (root / "r.txt").write_text(
        f"beta==2.0 --hash=sha256:{'0' * 64} --hash sha256:{good.upper()}\n"
    )
    made = lock("r.txt")
    assert versions(made) == {"beta": "2.0"}
    (root / "limits.txt").write_text(f"beta==2.0 --hash=sha256:{'1' * 64}\n")
    assert fails(lock, "beta", constraints=["limits.txt"]).context


@pytest.mark.parametrize("place", ["path", "file", "server", "sdist", "sdist on a server"])
def test_hashes_of_a_path_and_of_a_url_are_checked(lock, index_env, tmp_path, root, place):
    """As an option and as a fragment; an sdist is not even unpacked where they rule it out."""
    files = tmp_path / "elsewhere"
    files.mkdir()
    file = own_sdist(files, "gamma") if "sdist" in place else make_wheel(files, "gamma")
    good = digest_file(file)
    with serve(Index(folder=files)) as index:
        url = f"http://127.0.0.1:{index.port}/files/{file.name}"
        text = {"path": str(file), "file": file.as_uri(), "sdist": str(file)}.get(place, url)
        lines = {digest: [f"{text} --hash=sha256:{digest}"] for digest in (good, "0" * 64)}
        if "://" in text:
            for digest, spellings in lines.items():
                spellings.append(f"gamma @ {text}#sha256={digest}")
        for line in lines["0" * 64]:
            (root / "r.txt").write_text(f"{line}\n")
            if place == "server" and "#" in line:  # uv takes the fragment's word; a build does not
                assert lock("r.txt").files[0].sha256 == "0" * 64
                continue
            with pytest.raises(StagerError) as caught:
                lock("r.txt")
            assert good in str(caught.value.context)
        for line in lines[good]:
            (root / "r.txt").write_text(f"{line}\n")
            assert versions(lock("r.txt")) == {"gamma": "1.0"}


def test_hashes_are_part_of_what_a_lock_is_made_for_and_some_are_refused(
    lock, index_env, ask, root
):
    made = lock("beta==2.0")
    digest = "0" * 64
    (root / "r.txt").write_text(f"beta==2.0 --hash=sha256:{digest}\n")
    assert not made.is_current(ask("r.txt"))
    own_backend(root / "lib")
    (root / "r.txt").write_text(
        f"beta==2.0 --hash=sha512:{digest}{digest}\n./lib --hash=sha256:{digest}\n"
        f"git+https://example.org/a.git --hash=sha256:{digest}\n"
        "https://example.org/a-1-py3-none-any.whl#md5=0\n"
    )
    with pytest.raises(ConfigError) as caught:
        ask("r.txt")
    assert len(caught.value.context) == 4
    told = "\n".join(caught.value.context)
    for said in (
        "a sha512 cannot be checked; give the file's sha256",
        "./lib is a folder, which has no sha256",
        "a repository has no sha256; name a commit",
        "a md5 cannot be checked",
    ):
        assert said in told


def test_wheels_are_chosen_by_platform_and_then_by_build_tag(lock, index_env, wheelhouse):
    for tag in (f"linux_{HERE.machine}", f"manylinux_2_17_{HERE.machine}"):
        for build in ("", "2-", "10-"):
            wheel = make_wheel(wheelhouse, "gamma", "1.0", tag=f"py3-none-{tag}")
            wheel.rename(wheel.with_name(wheel.name.replace("1.0-", f"1.0-{build}")))
    chosen = lock("gamma").files[0].filename
    assert chosen == f"gamma-1.0-10-py3-none-manylinux_2_17_{HERE.machine}.whl"


def test_the_file_that_the_hashes_allow_is_taken(lock, wheelhouse, root, only_index):
    make_wheel(wheelhouse, "gamma", "1.0", tag=f"{HERE.python_tag}-none-any")
    other = make_wheel(wheelhouse, "gamma", "1.0")
    (root / "r.txt").write_text(f"gamma==1.0 --hash=sha256:{digest_file(other)}\n")
    with serve(Index(folder=wheelhouse)) as index:
        only_index(index.url)
        assert lock("r.txt").files[0].filename == other.name


def test_hashes_that_are_required(lock, index_env, wheelhouse, root, ask, monkeypatch):
    """Of what is named, before anything is resolved; of what that needs, once it is known."""
    (root / "plain.txt").write_text("alpha\n")
    (root / "r.txt").write_text("--require-hashes\n-r plain.txt\n")
    with pytest.raises(ConfigError) as caught:
        ask("r.txt")
    missing = "alpha has no --hash=sha256:..., which {} requires"
    assert caught.value.context == ("plain.txt:1: " + missing.format("r.txt:1"),)
    for name in ("PIP_REQUIRE_HASHES", "UV_REQUIRE_HASHES"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            with pytest.raises(ConfigError) as caught:
                ask("plain.txt")
        assert caught.value.context == ("plain.txt:1: " + missing.format(name),)
    hashes = {}
    for name in ("alpha-1.0", "beta-2.0"):
        digest = digest_file(wheelhouse / f"{name}-py3-none-any.whl")
        hashes[name[:-4]] = f"--hash=sha256:{digest}"
    (root / "r.txt").write_text(f"--require-hashes\nalpha==1.0 {hashes['alpha']}\n")
    error = fails(lock, "r.txt")
    assert error.context == ("beta==2.0 has no hash in the requirements",)
    with (root / "r.txt").open("a") as file:
        file.write(f"beta==2.0 {hashes['beta']}\n")
    assert versions(lock("r.txt")) == {"alpha": "1.0", "beta": "2.0"}


def test_the_build_of_pytorch_that_is_asked_for_wins(lock, index_env, wheelhouse, root):
    """Hashes leave the choice alone."""
    plain = make_wheel(wheelhouse, "torch", "2.13.0", requires=["nvidia-cublas", "triton"])
    make_wheel(wheelhouse, "torch", "2.13.0+cpu")
    (root / "r.txt").write_text(f"torch==2.13.0 --hash=sha256:{digest_file(plain)}\n")
    for asked in ("torch==2.13.0", "r.txt"):
        assert versions(lock(asked, torch_backend="cpu")) == {"torch": "2.13.0+cpu"}
    assert fails(lock, "r.txt").context


@pytest.mark.usefixtures("index_env")
def test_a_wheel_file_is_locked_as_that_file(lock, tmp_path):
    mine = make_wheel(tmp_path / "mine", "beta", "1.1", files={"beta.py": "MINE = True\n"})
    made = lock("alpha", str(mine))
    assert versions(made)["beta"] == "1.1"  # not 2.0, which the index has
    assert made.files[1].path == mine
