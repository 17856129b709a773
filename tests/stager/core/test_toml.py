import datetime
import os
from pathlib import Path

import pytest

from stager.core import toml
from stager.core.errors import ConfigError

DOCUMENT = {
    "text": 'quotes " backslash \\ tab \t newline \n bell \x07 delete \x7f é 漢',
    "yes": True,
    "count": -3,
    "ratio": 0.5,
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc),
    "none": [],
    "long": ["x" * 40, "y" * 40, "z" * 40],
    "key with spaces": 1,
    "rows": [
        {"name": "a", "files": [{"url": "u", "hashes": {"sha256": "0"}}, {"url": "v"}]},
        {"name": "b", "empty": {}},
    ],
    "tool": {"stager": {"x": 1, "inner": {"dotted.key": "v"}}},
    "hollow": {},
}


def test_what_is_written_reads_back_the_same():
    assert toml.loads("\ufeff" + toml.dumps(DOCUMENT), Path("x.toml")) == DOCUMENT  # with a BOM
    assert toml.dumps({"tool": {"stager": {"x": 1}}}) == "[tool.stager]\nx = 1\n"  # no [tool]


def test_a_value_toml_lacks_is_refused():
    with pytest.raises(TypeError, match="no type for NoneType"):
        toml.dumps({"x": None})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = 1\nb = = 2\n", "line 2, column 5: "),
        (b"[x\n", "line 1, column 3: "),
        (b'a = "\xff"\n', "byte 5 is not UTF-8"),
        (b"[a]\n[trust.more]\n[trust]\nx = 1\n\n[trust]\n", "line 6, column 7: Cannot declare"),
        (b"a = " + b"[" * 3000 + b"]" * 3000, "maximum recursion depth exceeded"),
        (b"a = " + b"9" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_no_toml_is_an_error_that_says_where(tmp_path, content, says):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        toml.read(path)
    assert caught.value.message.startswith(f"{path}: {says}")
    assert "(at" not in caught.value.message
    assert caught.value.hint


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*pipe\.toml: is not a regular file"):
        toml.read(tmp_path / "pipe.toml")
