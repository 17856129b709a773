"""The proof that a bundle's own Python runs in another place, and finds all of itself there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bundle.environment.listing import OWN_PYTHON, own_python

from ..core.errors import StagerError
from ..core.processes import CommandError, feed

_SECONDS = 120.0
_OF_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/share/")
"""Where every Linux has what programs of any place use: glibc, locales."""
_IMPORTS = "IMPORTS"
"""The beginning of the line that names the module which comes next."""
# Modules that do not import here may lack a library of this machine, which the build has named.
_PROGRAM = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.machinery, json, os, sysconfig
folder = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
endings = importlib.machinery.EXTENSION_SUFFIXES
for name in sorted(os.listdir(folder) if os.path.isdir(folder) else ()):
    if name.endswith(tuple(endings)):
        module = name.partition(".")[0]
        try:
            print("IMPORTS", module, file=sys.stderr, flush=True)
            __import__(module)
        except Exception:
            pass
print("IMPORTS", file=sys.stderr, flush=True)
with open("/proc/self/maps") as handle:
    mapped = {line.split(None, 5)[5].rstrip() for line in handle if "/" in line}
print(json.dumps({
    "places": [sys.prefix, sys.exec_prefix, folder, *sys.path],
    "mapped": sorted(mapped),
}))
"""


def faults_elsewhere(env_dir: Path, python: str, denied: Sequence[str] = ()) -> list[str]:
    """Start a bundle's Python behind ``denied`` (no network); return what it takes from outside."""
    top = (env_dir / OWN_PYTHON).resolve()
    program = own_python(str(env_dir), python)
    argv = [*denied, program, "-s", "-B", "-c", _PROGRAM]
    try:
        done = feed(argv, "", environment={}, timeout=_SECONDS)
        said = json.loads(done.stdout)
    except CommandError as exc:
        lines = exc.completed.stderr.splitlines()
        imports = [line for line in lines if line.startswith(_IMPORTS)]
        module = imports[-1].removeprefix(_IMPORTS).strip() if imports else ""
        if module:
            ended = f"exit status {exc.completed.returncode}"
            return [f"its Python ends elsewhere when it imports {module}: {ended}"]
        return [f"its Python does not start elsewhere: {' '.join(exc.context[-1:])}"]
    except (StagerError, ValueError) as exc:
        return [f"its Python does not start elsewhere: {exc}"]
    faults = [
        f"its Python looks for modules in {place}"
        for place in said["places"]
        if not Path(place).resolve().is_relative_to(top)
    ]
    for file in said["mapped"]:
        if not file.startswith(_OF_SYSTEM) and not Path(file).is_relative_to(top):
            faults.append(f"its Python uses {file}, which the nodes need not have")
    return list(dict.fromkeys(faults))
