#!/usr/bin/env python3
"""Take the pictures of the README: a run on a terminal, and the report about it.

Usage: .venv-test/bin/python scripts/pictures.py [DIRECTORY]

Trains ``examples/mlp`` on two nodes that are both this machine, and writes ``run.svg`` and
``report.png`` (default: ``docs/pictures``). Needs a package index, Chromium, and the environment
that ``scripts/test`` makes. Folders and the user's number are shown as anybody's.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

REPO = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = ("run", "--allocation", "local")
COLUMNS = 96
WINDOW = (1000, 1290)
"""Of the browser, in pixels: as much of the report as a reader takes in at once."""
COLOURS = 256
"""Of the picture of a page: enough for the few that are not grey."""
THEME = TerminalTheme(
    (245, 246, 248),
    (27, 31, 36),
    [
        *((27, 31, 36), (194, 31, 42), (26, 127, 55), (138, 90, 0)),
        *((10, 88, 202), (130, 80, 223), (17, 112, 125), (87, 96, 106)),
    ],
)
# As rich has it, but for the fonts, which it would fetch, and the three buttons of a window.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "SFMono-Regular", Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
{lines}
</defs>
<rect fill="#f5f6f8" width="100%" height="100%" rx="8"/>
<g transform="translate({terminal_x}, 20)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The place where the job runs."""

    home: Path
    """An empty folder."""
    store: Path
    """The offline root."""

    @property
    def disk(self) -> Path:
        """The disk of the nodes."""
        return self.home / "disk"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of the commands: none of the user's settings, but the user's caches."""
        caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        own = {name: value for name, value in os.environ.items() if not name.startswith("STAGER_")}
        return {
            "XDG_CACHE_HOME": str(caches),
            "UV_CACHE_DIR": str(caches / "uv"),
            **own,
            "HOME": str(self.home),
            "OFFLINE_ROOT": str(self.store),
            "STAGER_NODE_ROOT": str(self.disk),
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
        }

    def neutral(self, text: str) -> str:
        """Return a text without the folders and the user of this machine."""
        for found, shown in (
            (str(self.store), "~/offline_repo_py311"),
            (str(self.disk), "/tmp"),  # noqa: S108 - a name to show
            (str(self.home), "~"),
            (f"stager-{os.getuid()}/", "stager-1000/"),
        ):
            text = text.replace(found, shown)
        return text


def main() -> int:
    """Build, run, report, and take both pictures."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "docs" / "pictures"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stager-pictures-") as folder:
        home = Path(folder)
        store = Path(os.environ.get("OFFLINE_ROOT", home / "offline")).resolve()
        place = Workplace(home=home, store=store)
        project = home / "mlp"
        place.disk.mkdir()
        shutil.copytree(
            REPO / "examples" / "mlp", project, ignore=shutil.ignore_patterns("mlp_out")
        )
        stager(place, project, "build")
        shown = on_terminal(place, project, *COMMAND)
        picture_of_terminal(place.neutral(shown), target / "run.svg")
        stager(place, project, "report", "-o", str(home / "report.html"))
        page = home / "page.html"
        page.write_text(place.neutral((home / "report.html").read_text(encoding="utf-8")))
        picture_of_page(place, page, target / "report.png")
    for name in ("run.svg", "report.png"):
        print(f"{target / name}: {(target / name).stat().st_size:,} bytes")
    return 0


def stager(place: Workplace, folder: Path, *words: str) -> None:
    """Run a command of the tool."""
    argv = [sys.executable, "-m", "stager", *words]
    subprocess.run(argv, cwd=folder, env=place.environment, check=True)


def on_terminal(place: Workplace, folder: Path, *words: str) -> str:
    """Return what a command of the tool writes on a terminal."""
    ours, its = pty.openpty()
    argv = [sys.executable, "-m", "stager", *words]
    with subprocess.Popen(
        argv, cwd=folder, env=place.environment, stdin=subprocess.DEVNULL, stdout=its, stderr=its
    ) as process:
        os.close(its)
        written = b""
        while data := _read(ours):
            written += data
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit status {process.returncode}\n{written.decode()}")
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so where nobody has the other end any more
        return b""


def picture_of_terminal(written: str, path: Path) -> None:
    """Write a terminal's text as SVG."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ stager {' '.join(COMMAND)}", style="bold"))
        console.print(Text.from_ansi(written.rstrip()))
        drawn = console.export_svg(title="", theme=THEME, code_format=SVG, unique_id="run")
    path.write_text(drawn, encoding="utf-8")


def picture_of_page(place: Workplace, page: Path, path: Path) -> None:
    """Write a screenshot of a page as PNG, with few colours."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("no Chromium here (Debian: apt-get install chromium)")
    raw = place.home / "raw.png"
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    argv += [f"--user-data-dir={place.home / 'profile'}", "--window-size={},{}".format(*WINDOW)]
    argv += [f"--screenshot={raw}", page.as_uri()]
    subprocess.run(argv, env=place.environment, check=True, timeout=120, capture_output=True)
    # By name: Pillow is there with the trainer's libraries, not when the code is checked.
    image = import_module("PIL.Image").open(raw).convert("RGB")
    image.quantize(COLOURS, dither=0).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
