"""The error family: one root, and the exit codes that scripts rely on."""

from __future__ import annotations

import pytest

from bundle.system.processes import CompletedCommand
from stager.core import errors
from stager.core.errors import JobError, StagerError
from stager.core.processes import CommandError

FAMILY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def test_exit_codes_are_the_documented_ones():
    codes = (errors.EXIT_OK, errors.EXIT_FAILURE, errors.EXIT_JOB)
    assert codes == (0, 1, 3)


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_has_the_root_and_says_why(kind):
    error = kind("it broke", hint="mend it", context=["line 1", "line 2"])
    assert isinstance(error, StagerError)
    assert (str(error), error.message, error.hint) == ("it broke", "it broke", "mend it")
    assert error.context == ("line 1", "line 2")
    assert error.exit_code == (3 if kind is JobError else 1)


def test_an_error_needs_no_hint():
    error = StagerError("it broke")
    assert (error.hint, error.context) == ("", ())


def test_context_cannot_change_behind_an_errors_back():
    lines = ["line 1"]
    error = StagerError("it broke", context=lines)
    lines.append("line 2")
    assert error.context == ("line 1",)


def test_a_failed_command_belongs_to_the_family():
    done = CompletedCommand(argv=("pip", "two words"), returncode=1, stdout="", stderr="")
    error = CommandError(done, reason="exit status 1")
    assert isinstance(error, StagerError)
    assert error.message == "exit status 1: pip 'two words'"
    assert error.exit_code == errors.EXIT_FAILURE
