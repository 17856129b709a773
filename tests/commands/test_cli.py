"""The command line as a user meets it: help, usage errors, exit codes, and what goes where."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from stager import __version__
from stager.cli import COMMANDS, main
from stager.cli.application import boundary
from stager.console.output import Output
from tests.support.building import HOST, Project
from tests.support.fake_slurm import slurm_commands
from tests.support.golden import check_golden
from tests.support.processes import run

REPO = Path(__file__).resolve().parents[2]
STAGER = str(Path(sys.executable).with_name("stager"))
LOCAL = ("--allocation", "local", "--nodes", "1")
HEAVY = (
    "rich",
    "zstandard",
    "packaging",
    "installer",
    "piptools",
    "cyclonedx",
    "stager.building.build",
    "bundle.environment.unpack",
)


Here = Callable[..., subprocess.CompletedProcess[str]]


def stager(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run([STAGER, *arguments], cwd=cwd, env={**os.environ, **env})


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Here]:
    """Runs a command in this process: most need none of their own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["stager", *arguments])
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in signals}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # it names the program
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(here: Here, option: str) -> None:
    done = here(option)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stager {__version__}\n", "")


def test_the_settings_may_be_elsewhere(tmp_path: Path) -> None:
    """A lock without requirements needs no index; where it is written shows what was read."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stager.toml").write_text("[environment]\nrequirements = []\n")
    other = tmp_path / "two" / "other.toml"
    other.write_text("[environment]\nrequirements = []\n")
    for options, folder in (
        (["--directory", "one"], "one"),
        (["--project", "two"], "two"),
        (["--config", "two/other.toml"], "two"),
    ):
        done = stager(*options, "lock", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        written = tmp_path / folder / "pylock.toml"
        assert written.exists()
        written.unlink()


def test_help_is_quick(tmp_path: Path) -> None:
    """In counts: 0.12 s where 145 modules were imported, 64,000 functions called."""
    code = (
        "import sys\nbefore, started = set(sys.modules), []\n"
        "process = ('subprocess.Popen', 'os.posix_spawn', 'os.fork', 'os.system')\n"
        "sys.addaudithook(lambda event, _: event in process and started.append(event))\n"
        "from stager.cli import main\nfrom tests.support.counting import calls\n"
        "count = calls(lambda: main(['--help']))\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
        "print(len(set(sys.modules) - before), count, started, file=sys.stderr)\n"
    )
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "Commands:" in done.stdout
    heavy, counts = done.stderr.splitlines()
    assert heavy == "[]"
    modules, count, started = counts.split()
    assert (int(modules) < 220, int(count) < 150_000, started) == (True, True, "[]"), done.stderr


ALL_FILES = {"carrying_commands", "job_commands", "log_commands", "node_commands"}


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["run", "--help"], {"job_commands"}),
        (["--project", "logs", "import", "--help"], {"carrying_commands", "log_commands"}),
        (["--help"], ALL_FILES),
        (["verfy", "logs"], ALL_FILES),
    ],
)
def test_only_the_commands_that_are_named_are_imported(
    tmp_path: Path, words: list[str], loaded: set[str]
) -> None:
    """Of these four files; a word may be the value of an option."""
    (tmp_path / "logs").mkdir()
    code = (
        "import sys\nfrom stager.cli import main\nmain(sys.argv[1:])\n"
        f"some = {sorted(ALL_FILES)!r}\n"
        "print([name for name in some if 'stager.cli.' + name in sys.modules], file=sys.stderr)\n"
    )
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == str(sorted(loaded))
    if "--help" in words:
        assert "Usage: " in done.stdout
    else:
        assert "did you mean" in done.stderr.lower(), done.stderr


def test_help_names_every_command_and_fits_80_columns(here: Here) -> None:
    shown = here("--help").stdout
    commands = [command for command in COMMANDS if command != "plan"]
    for command in commands:
        line = next(line for line in shown.splitlines() if line.split()[:1] == [command])
        assert not line.endswith("...")
    texts = []
    for command in ("", *commands):
        argv = [command, "--help"] if command else ["--help"]
        done = here(*argv)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\x1b" not in done.stdout
        texts.append(f"$ stager {' '.join(argv)}\n{done.stdout}")
    check_golden("help.txt", "\n".join(texts))
    assert here("-h").stdout == shown


def test_without_a_command_help_is_shown(here: Here) -> None:
    done = here()
    assert done.returncode in (0, 2)
    assert "Commands:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runn"], "Did you mean 'run'"),
        (["run", "--nodez", "2"], "--nodez"),
        (["run", "--nodes", "0"], "--nodes"),
        (["run", "--backend", "mpi", "--", "x.py"], "'mpi' is not one of auto, gloo, nccl"),
        (["verify", "--launcher", "mpirun"], "'mpirun' is not one of torchrun, srun"),
        (["build", "--resolver", "poetry"], "'poetry' is not one of auto, uv, pip-tools"),
        (["exec"], "COMMAND"),
        (["run", "--nodes", "3:2"], "'3:2' cannot be used"),
        (["run", "--allocation", "cloud"], "'cloud' is not one of auto, slurm, ssh, local"),
        (["run", "--stage", "maybe"], "'maybe' is not one of auto, always, never"),
        (["run", "--outputs", "../out"], "--outputs"),
        (["run", "--pass-env", "HF_TOKEN=hunter2"], "--pass-env"),
        (["estimate", "--nodes", "0"], "'0' cannot be used, allowed: 1 to 100000"),
        (["estimate", "--nodes", "1,many"], "'many' cannot be used"),
        (["run", "--on-failure", "notify 'open"], '--on-failure: "notify \'open" cannot be used'),
        (["verify", "--on-failure", " "], "a command and its arguments, with closed quotes"),
        (["clean", "--avoid-bad"], "--avoid-bad"),
        (["nodes", "--days", "0"], "--days"),
        (["nodes", "--forget", "n[1-"], "--forget: the node list cannot be read"),
        (["verify", "--wait"], "--batch"),
        (["run", "--log-dir", ""], "'--log-dir': it is empty"),
        (["support", "-o", ""], "it is empty"),
        (["--directory", "nowhere", "run"], "--directory"),
        (["--project", ".", "--config", "stager.toml", "run"], "--project: cannot be used with"),
        (["--config", "nowhere.toml", "build"], "nowhere.toml is not a file"),
        (["--project", "a" * 5000, "build"], "is not a directory"),
        (["run", "--log-dir", "~nobody-here/logs"], "there is no home directory"),
        (["build", "--trace"], "there is no smoke test to run"),
        (["build", "train.py", "again"], "'again' cannot be used"),
        (["sign"], "missing option '--key'"),
        (["clean", "--nodes-only", "--store-only"], "--nodes-only: cannot be used with"),
        (["inspect", "--files", "--sbom"], "--files: cannot be used with --sbom"),
        (["inspect", "--licenses", "--sbom"], "--licenses: cannot be used with --sbom"),
        (["inspect", "-o", "x.cdx.json"], "--output: is for --sbom only"),
        (["inspect", "--sbom", "--json"], "that prints JSON of its own"),
        (["export", "--base", "xyz"], "'xyz' cannot be used, allowed: 12 to 64 hexadecimal"),
        (["export", "--since", "soon"], "'soon' cannot be used, allowed: a date (2026-01-31)"),
        (["export", "--base", "0" * 12, "--since", "2026-01-31"], "cannot be used with --since"),
        (["export", "--offline"], "is for --with-tool only"),
        (["export", "--squashfs", "--base", "0" * 12], "--base: cannot be used with --squashfs"),
        (["export", "--squashfs", "--with-tool"], "--with-tool: cannot be used with --squashfs"),
        (["import"], "missing argument 'FILE'"),
        (["import", "x", "--id", "12"], "'12' cannot be used"),
        (["mirror", ""], "it is empty: is a shell variable unset?"),
    ],
)
def test_usage_errors_are_2(here: Here, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = here(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert re.search(r"^hint: `.*--help`", done.stderr, re.MULTILINE)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("*.toml")) == []


@pytest.mark.parametrize("command", ["lock", "build", "verify", "run", "exec", "estimate"])
def test_a_folder_without_a_project(here: Here, command: str) -> None:
    arguments = [command, "--", "true"] if command in ("run", "exec") else [command]
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no stager.toml")
    assert "hint: run `stager init`" in done.stderr


def test_a_project_that_was_never_built(project: Project) -> None:
    done = project.expect("run", "--", "train.py", code=1)
    assert "there is no bundle of project" in done.stderr
    assert "`stager build`" in done.stderr


def test_slurm_without_its_commands(project: Project) -> None:
    argv = ("run", "--json", "--allocation", "slurm", "--", "train.py")
    done = project.expect(*argv, code=1, env={"PATH": "/nowhere"})
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "--allocation slurm" in report["error"]["message"]
    assert "salloc, sbatch, srun" in report["error"]["message"]
    assert "--allocation local" in report["error"]["hint"]
    assert done.stderr.startswith("error: --allocation slurm")


def test_completion(tmp_path: Path) -> None:
    shown = stager("--show-completion", "bash", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "complete -o default -F _stager_completion stager" in shown.stdout
    offered = stager(
        cwd=tmp_path, _STAGER_COMPLETE="complete_bash", COMP_WORDS="stager ver", COMP_CWORD="1"
    ).stdout
    assert offered.split() == ["verify"]


def test_verbose_shows_the_commands_that_are_run_and_quiet_leaves_the_result(
    project: Project,
) -> None:
    project.build()
    plain = project.stager("verify", *LOCAL, "--log-dir", "logs")
    verbose = project.stager("verify", *LOCAL, "--log-dir", "logs", "-v")
    assert plain.returncode == verbose.returncode == 0
    assert "start: " not in plain.stderr
    assert "node" in verbose.stderr
    assert f"start: {sys.executable} -I -S " in verbose.stderr
    quiet = project.stager("verify", *LOCAL, "--log-dir", "logs", "-q")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout.startswith("NODE local1 OK -> PY 3.")


def test_config_shows_the_values_in_force(project: Project) -> None:
    project.settings("alpha", more='[launch]\ninterface = { "node0[1-3]" = "ens1" }')
    home = {"OFFLINE_ROOT": "", "HOME": "/home/somebody"}
    default = f"/home/somebody/offline_repo_py{HOST.python.replace('.', '')}"
    shown = project.stager("config", env=home).stdout
    words = {str(project.root): "<project>", default: "<offline root>"}
    words[os.environ["STAGER_NODE_ROOT"]] = "<node root>"
    words |= {f'"{HOST.python}"': '"<python>"', f'"{HOST.platform}"': '"<platform>"'}
    for text, word in words.items():
        assert text in shown
        shown = shown.replace(text, word)
    check_golden("config.txt", shown)
    other = project.stager("config", env={**home, "STAGER_ENVIRONMENT_PYTHON": "3.99"}).stdout
    assert 'environment.offline-root = "/home/somebody/offline_repo_py399"  # default' in other


# --- script and clean ----------------------------------------------------------------------------


PROCESSES = '[launch]\nlauncher = "processes"\n'
SRUN = '[launch]\nlauncher = "srun"\n'


def test_script_is_a_whole_batch_script(project: Project) -> None:
    """On standard output, byte for byte; what became of the command is talk."""
    project.settings("alpha", more=SRUN).build()
    slurm = ["-w", "n3", "--qos", "high", "-C", "a100&nvlink", "--reservation", "class"]
    slurm += ["--gpus-per-node", "a100:4", "--salloc-arg=--nice=5", "--salloc-arg=--exclusive"]
    slurm += ["--mem", "64GB", "--time", "UNLIMITED"]
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "train.py", "--epochs", "3"]
    options = ["-N", "2", "-p", "gpu", "-x", "n1", "--log-dir", "logs", *slurm]
    env = {"SALLOC_OPTS": "--exclude=n2 --mem=8G", "HF_TOKEN": "hunter2"}
    options += ["--pass-env", "HF_TOKEN"]
    done = project.expect("script", *options, "--", *command, env=env)
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclude=n1,n2",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --nodelist=n3",
        "#SBATCH --qos=high",
        '#SBATCH --constraint="a100&nvlink"',
        "#SBATCH --reservation=class",
        "#SBATCH --gpus-per-node=a100:4",
        "#SBATCH --mem=64G",
        "#SBATCH --time=UNLIMITED",
        "#SBATCH --nice=5 --exclusive --mem=8G",
    ):
        assert line in lines
    assert "--standalone" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    told = json.loads(done.stdout[done.stdout.index('{\n  "v": ') :].partition("\n}\n")[0] + "\n}")
    assert told["launch"]["command"] == ["train.py", "--epochs", "3"]
    assert (told["launch"]["nproc_per_node"], told["launch"]["pass_env"]) == (2, ["HF_TOKEN"])
    assert (told["id"], told["nodes"], told["allocation"]) == ("", [], "slurm")

    again = project.stager("script", "--json", *options, "--", *command, env=env)
    assert json.loads(again.stdout) == {"schema": 1, "script": done.stdout}
    checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False)
    assert checked.returncode == 0
    requeue = project.stager("script", "--requeue", *options, "--", *command, env=env)
    assert "#SBATCH --requeue" in requeue.stdout.splitlines()


def test_what_a_script_gets_and_what_of_it_does_not_count_is_said(project: Project) -> None:
    script = project.root / "train.py"
    script.write_text('# /// script\n# dependencies = ["beta"]\n# ///\n')
    project.settings("alpha", more=SRUN).build()
    words = ["train.py", "--nodes", "4", "--epochs=3", "--json"]
    behind = project.expect("script", *words)
    assert "warning: train.py gets --nodes, and stager does not" in behind.stderr
    assert "train.py: its own block (PEP 723) does not count" in behind.stderr
    assert "warning" not in project.expect("script", "--", *words).stderr


def test_clean_says_what_goes_and_keeps_what_is_needed(project: Project) -> None:
    built = project.build()
    project.expect("verify", *LOCAL, "--log-dir", "logs")
    stale = project.store.root / "seals" / "old.pkgs.tar.txt"
    stale.write_text("x" * 100)
    plan = project.stager("clean", *LOCAL, "--log-dir", "logs", "--json", "--dry-run")
    report = json.loads(plan.stdout)
    assert (report["ok"], report["dry_run"], stale.exists()) == (True, True, True), plan.stderr
    assert [item["path"] for item in report["items"]] == [str(stale)]

    done = project.expect("clean", *LOCAL, "--log-dir", "logs")
    assert done.stdout.startswith(f"offline root: 100 bytes  {stale}")
    assert not stale.exists()
    assert built.packed.path.exists()
    kept = f"kept on 1 node: the environment of {built.packed.path.name}; --all removes it, too"
    assert kept in done.stderr

    ran = project.stager("exec", "-q", "--", "python", "-c", "import sys; print(sys.prefix)")
    whole = project.stager("clean", *LOCAL, "--log-dir", "logs", "--json", "--nodes-only", "--all")
    items = json.loads(whole.stdout)["items"]
    assert {(item["place"], item["kind"]) for item in items} == {("local1", "environment")}
    paths = [Path(item["path"]) for item in items]
    assert len(paths) == 2, "the node's, and the one that exec has made beside it"
    assert Path(ran.stdout.strip()) in paths
    assert not any(path.exists() for path in paths)
    assert built.packed.path.exists()


def test_clean_with_a_slurm_that_does_not_answer(project: Project, tmp_path: Path) -> None:
    """The nodes cannot be cleaned, and the command fails; the offline root is clean."""
    project.settings("alpha", more="[cluster]\nnodes = 3").build()
    stale = project.store.root / "seals" / "old.pkgs.tar.txt"
    stale.write_text("x" * 100)
    broken = "echo 'error: no such cluster' >&2; exit 1"
    done = project.stager("clean", env=slurm_commands(tmp_path / "bin", broken))
    assert (done.returncode, stale.exists()) == (1, False), done.stderr
    assert "removed from the offline root: 1 item" in done.stderr
    assert "no such cluster" in done.stderr


def test_clean_without_slurm_cleans_what_is_there(project: Project) -> None:
    project.settings("alpha", more="[cluster]\nnodes = 3").build()
    stale = project.store.root / "seals" / "old.pkgs.tar.txt"
    stale.write_text("x" * 100)
    without = {"PATH": str(Path(sys.executable).parent), "SLURM_JOB_ID": ""}
    done = project.stager("clean", "-q", env=without)
    assert (done.returncode, stale.exists()) == (0, False), done.stderr
    assert done.stderr.startswith("warning: the nodes were not cleaned: the job needs 3 nodes")
    assert "Slurm is not available here" in done.stderr
    report = json.loads(project.stager("clean", "--json", env=without).stdout)
    assert report["ok"]
    assert "Slurm is not available here" in report["nodes_skipped"]
    for asked in (["--nodes-only"], ["--allocation", "slurm"]):
        assert project.stager("clean", *asked, env=without).returncode == 1
    only = json.loads(project.stager("clean", "--json", "--store-only", env=without).stdout)
    assert only["nodes_skipped"] is None


def test_a_dry_run_of_clean_does_not_ask_slurm(project: Project, tmp_path: Path) -> None:
    project.build()
    ask = dict.fromkeys(("salloc", "sbatch", "srun"), f"touch {tmp_path}/asked")
    slurm = slurm_commands(tmp_path / "bin", **ask)
    done = project.expect("clean", "--dry-run", "--allocation", "slurm", env=slurm)
    assert "the nodes were not examined: a dry run asks Slurm for nothing" in done.stderr
    assert not (tmp_path / "asked").exists()


# --- exec ----------------------------------------------------------------------------------------


@pytest.fixture
def built(project: Project) -> Project:
    project.build()
    return project


def test_exec_runs_in_the_environment(built: Project) -> None:
    code = "import alpha, os, sys; print(alpha.VERSION, sys.prefix, os.environ['PATH'])"
    done = built.expect("exec", "-q", "--", "python", "-c", code)
    version, prefix, path = done.stdout.split(maxsplit=2)
    assert (version, done.stderr) == ("1.0", "")
    assert prefix.startswith(os.environ["STAGER_NODE_ROOT"])
    assert path.startswith(f"{prefix}/bin{os.pathsep}")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["python", "-c", "raise SystemExit(7)"], 7),
        (["python", "-c", "raise SystemExit(0)"], 0),
        (["sh", "-c", "kill -9 $$"], -9),
        (["no-such-program-here"], 127),
        (["/etc/hostname"], 126),
    ],
)
def test_exec_ends_as_the_command_does(built: Project, command: list[str], code: int) -> None:
    done = built.stager("exec", "--", *command)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if code in (126, 127):
        assert command[0] in done.stderr


def test_packages_in_src_can_be_imported(project: Project) -> None:
    """Also from another directory, and by ranks."""
    package = project.root / "src" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("PLACE = __file__\n")
    (project.root / "train.py").write_text("import mine; print('from', mine.PLACE)\n")
    project.settings("alpha", more=PROCESSES).build()
    done = project.stager("exec", "-q", "--", "python", "-c", "import mine; print(mine.PLACE)")
    assert done.stdout.endswith("/project/src/mine/__init__.py\n"), done.stderr
    project.expect("run", *LOCAL, "--log-dir", "logs", "--", "train.py")
    (log,) = (project.root / "logs").glob("*.0.out")
    assert "/project/src/mine/__init__.py" in log.read_text()


def test_exec_passes_its_input_and_arguments_on(built: Project) -> None:
    code = "import sys; print(sys.argv[1:], sys.stdin.read())"
    arguments = ["exec", "--", "python", "-c", code, "--json", "a b", "--", "-q"]
    done = run([STAGER, *arguments], cwd=built.root, given="typed")
    assert done.stdout == "['--json', 'a b', '--', '-q'] typed\n"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--nosuch"], 2), (["inspect", "/nowhere"], 1), (["config"], 0)]
)
def test_talk_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    """As where a batch job's standard error is a file on a full disk."""
    (tmp_path / "stager.toml").write_text("[environment]\nrequirements = []\n")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [STAGER, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert done.returncode == code


def test_a_directory_that_is_gone_is_an_expected_failure(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", STAGER, "config"], cwd=gone)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: the current directory cannot be used" in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file cannot be written: No space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x"), "/x cannot be written: Disk quota"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []"), "temporary"),
    ],
)
def test_a_limit_of_the_machine_is_an_expected_failure(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, boundary(Output()):
        raise error
    assert caught.value.exit_code == 1
    text = capsys.readouterr().err
    assert said in text
    assert "hint: " in text
