"""A wheel whose library needs a newer glibc than its tag says, on the whole way to a node."""

from __future__ import annotations

import json
from pathlib import Path

from bundle.node.machine import c_library
from stager.pack.bundle_file import read_manifest
from tests.support.building import HOST, Project
from tests.support.shared_objects import HOST as PROCESSORS
from tests.support.shared_objects import glibc
from tests.support.wheelhouse import make_wheel

LATER = f"manylinux_2_99_{HOST.machine}"


def understated(folder: Path) -> Path:
    """A wheel for glibc 2.17 by its tag, and for 2.98 by its library."""
    library = glibc("2.17", "2.98", machine=PROCESSORS[HOST.machine])
    files = {"alpha/__init__.py": "", "alpha/_fast.so": library}
    tag = f"{HOST.python_tag}-{HOST.python_tag}-manylinux_2_17_{HOST.machine}"
    return make_wheel(folder, "alpha", files=files, tag=tag)


def test_a_node_is_refused_with_the_file_that_it_could_not_load(
    project: Project, tmp_path: Path
) -> None:
    wheel = understated(tmp_path)
    built = project.locked(wheel, more=f'platform = "{LATER}"').stager("build", "--json")
    assert built.returncode == 0, built.stderr
    note = "alpha 1.0 (alpha/_fast.so) needs glibc 2.98, though its tag is manylinux_2_17"
    assert note in built.stderr
    report = json.loads(built.stdout)
    assert not report["proved"], "this machine cannot load it either"
    needs = read_manifest(Path(report["bundle"])).requires
    assert (needs.libc_version, needs.libc_needed_by) == ("2.98", "alpha 1.0 (alpha/_fast.so)")

    checked = project.stager("verify", "--allocation", "local", "--json")
    assert checked.returncode == 3, checked.stderr
    (node,) = json.loads(checked.stdout)["nodes"]
    (problem,) = node["problems"]
    own = c_library()[1]
    assert f"alpha 1.0 (alpha/_fast.so) needs glibc 2.98 or newer, the node has {own}" in problem
