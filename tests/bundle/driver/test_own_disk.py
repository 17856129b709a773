"""The disk of the driver's own host."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bundle.driver import driver
from bundle.driver.phases import PlacePhase
from bundle.driver.placement import problems_of_own_disk, scratch
from bundle.protocol.enumerations import PhaseName
from bundle.protocol.problem import NodeError, ProblemCode
from tests.support.namespaces import namespace


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ProblemCode.HOST_DISK_FULL),
        (errno.EDQUOT, ProblemCode.HOST_DISK_FULL),
        (errno.EROFS, ProblemCode.HOST_DISK_UNWRITABLE),
        (errno.EIO, ProblemCode.HOST_DISK_UNWRITABLE),
    ],
)
def test_an_error_of_a_file_system_in_a_phase_is_the_hosts(number: int, code: ProblemCode) -> None:
    class Failing(PlacePhase):
        def use(self, state: Any) -> None:
            raise OSError(number, os.strerror(number), "/var/tmp/x")

    class Said:
        seconds: dict[PhaseName, float] = {}  # noqa: RUF012 - of this test only

        def emit(self, event: object) -> None:
            pass

    with pytest.raises(NodeError) as caught:
        driver._do(Failing(), Said())  # type: ignore[arg-type]
    assert caught.value.problem.code is code
    assert caught.value.problem.where == "/var/tmp/x"
    assert os.strerror(number) in caught.value.problem.why


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ConnectionResetError), problems_of_own_disk():
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_no_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(NodeError) as caught, scratch():
        pass
    assert caught.value.problem.code is ProblemCode.HOST_DISK_UNWRITABLE


def test_what_is_temporary_does_not_stay() -> None:
    with scratch() as folder:
        Path(folder, "part").write_bytes(b"x")
    assert not os.path.exists(folder)


def test_all_temporary_directories_are_full(tmp_path: Path) -> None:
    code = (
        "import os, tempfile\nos.chdir('/proc')\n"
        f"tempfile._candidate_tempdir_list = lambda: [{str(tmp_path)!r}]\n"
        "from bundle.driver.placement import scratch\n"
        "from bundle.protocol.problem import NodeError\n"
        "try:\n    with scratch(): print(json.dumps('made'))\n"
        "except NodeError as exc: print(json.dumps([str(exc.problem.code), exc.problem.why]))\n"
    )
    name, why = namespace("-m", f"mount -t tmpfs -o ro none '{tmp_path}'", code)
    assert name == "host-disk-unwritable"
    assert why.startswith("No usable temporary directory found")
