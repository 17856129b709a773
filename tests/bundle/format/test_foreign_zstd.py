"""The zstd library in a wheel for another Python: the same answers as under its own."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
import zstandard

from bundle.format.layer import LayerError
from bundle.format.zstd import load_decompressor, python_of
from bundle.protocol.problem import NodeError, ProblemCode
from stager.core.values import Wheel
from tests.support.building import HOST
from tests.support.interpreters import OTHERS

CONTENT = b"a layer's content, " * 5000
REPO = Path(__file__).resolve().parents[3]
ELSEWHERE = """\
import sys
sys.path.insert(0, sys.argv[1])
from bundle.format.zstd import load_decompressor
decompress = load_decompressor(sys.argv[3], open(sys.argv[2], "rb").read(), sys.argv[4])
sys.stdout.buffer.write(decompress(sys.stdin.buffer.read(), int(sys.argv[5])))
"""


@pytest.fixture
def wheel(zstd_wheel: Wheel | None) -> Wheel:
    """The decompressor for the Python that runs the tests."""
    if zstd_wheel is None:
        pytest.skip("this Python has zstd of its own")
    return zstd_wheel


def renamed(wheel: Wheel) -> str:
    """Its name as if it were for another Python, which is what decides how it is loaded."""
    assert python_of(wheel.path.name) == HOST.python
    return wheel.path.name.replace(HOST.python_tag, "cp37")


@pytest.mark.parametrize(
    ("name", "python"),
    [("zstandard-0.25.0-cp39-cp39-musllinux_1_2_x86_64.whl", "3.9"),
     ("zstandard-0.25.0-cp313-cp313-manylinux2014_x86_64.whl", "3.13"),
     ("zstandard-0.25.0-py3-none-any.whl", "")],
)  # fmt: skip
def test_a_wheels_name_has_its_python(name: str, python: str) -> None:
    assert python_of(name) == python


def test_frames_are_decompressed(wheel: Wheel, tmp_path: Path) -> None:
    decompress = load_decompressor(renamed(wheel), wheel.path.read_bytes(), str(tmp_path))
    compress = zstandard.ZstdCompressor().compress
    for content in (CONTENT, b""):
        assert decompress(compress(content), len(content)) == content
        assert decompress(compress(content), -1) == content
    assert not (tmp_path / "zstandard").exists(), "nothing else of the wheel is needed"


def test_what_is_no_whole_frame_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    decompress = load_decompressor(renamed(wheel), wheel.path.read_bytes(), str(tmp_path))
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT)
    changed = bytearray(frame)
    changed[-1] ^= 1
    for damaged in (frame[:-1], frame + b"x", frame + frame, bytes(changed), b"", b"x" * 40):
        with pytest.raises(LayerError, match="frame"):
            decompress(damaged, len(CONTENT))
    with pytest.raises(LayerError, match="claims to hold"):
        decompress(frame, len(CONTENT) - 1)
    unsized = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(unsized, closefd=False) as writer:
        writer.write(CONTENT)
    with pytest.raises(LayerError, match="claims to hold None"):
        decompress(unsized.getvalue(), -1)


@pytest.mark.parametrize("data", [b"no wheel", b""])
def test_a_wheel_without_the_library_does_not_load(
    data: bytes, wheel: Wheel, tmp_path: Path
) -> None:
    with pytest.raises(NodeError) as caught:
        load_decompressor(renamed(wheel), data, str(tmp_path))
    assert caught.value.problem.code is ProblemCode.DECOMPRESSOR_UNUSABLE


@pytest.mark.parametrize("python", OTHERS)
def test_each_python_loads_the_wheel_for_this_one(
    python: str, wheel: Wheel, tmp_path: Path
) -> None:
    argv = [python, "-I", "-S", "-c", ELSEWHERE, str(REPO), str(wheel.path), wheel.path.name]
    frame = zstandard.ZstdCompressor().compress(CONTENT)
    done = subprocess.run(
        [*argv, str(tmp_path), str(len(CONTENT))], input=frame, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == CONTENT
