# Sourced by the other scripts: finds a Python and keeps their virtual environments.
# shellcheck shell=bash

# What the caller's shell exports must not reach into the environments made here.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

# Prints the path of a Python that can be used, $PYTHON or the first that fits.
find_python() {
    local candidate found='' reason='' version
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.{13,12,11,10,14}; do
        # A version manager's stand-in may be there without the version that it stands for.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
            2>/dev/null) || continue
        found+=" $candidate($version)"
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            reason='Python 3.10 or newer is needed'
            continue
        }
        "$candidate" -c 'import venv, ensurepip' 2>/dev/null || {
            reason="$candidate cannot make virtual environments: venv or ensurepip is missing"
            reason+=" (on Debian and Ubuntu: apt-get install python$version-venv)"
            continue
        }
        "$candidate" -c 'import sys; print(sys.executable)'
        return
    done
    fail "no usable Python${reason:+: $reason}" "tried:${found:- python3 is not on PATH}" \
        'install one (Debian and Ubuntu: sudo apt-get install python3 python3-venv),' \
        'or name one with PYTHON=/path/to/python3'
}

# may_install: whether missing programs can be installed here.
may_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}

# install_system_packages PACKAGE...: with apt-get, as root.
install_system_packages() {
    say "installing with apt-get: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null # hundreds of lines; errors show
}

# need_python: a bare Debian has no Python, or one without venv.
need_python() {
    if python3 -c 'import venv, ensurepip' 2>/dev/null; then return; fi
    if may_install; then install_system_packages python3 python3-venv; fi
}

# make_venv DIR: a virtual environment, kept if it is there and works.
make_venv() {
    local python
    if [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    say "making $1 with $python"
    rm -rf "$1"
    "$python" -m venv "$1"
}

# uv_index_options DIR: pip's index settings as options for uv, one a line; uv does not read them.
uv_index_options() {
    "$1/bin/python" -m pip config list | "$1/bin/python" -c '
import ast, sys
plain = {"index-url": "--index-url", "extra-index-url": "--extra-index-url",
         "find-links": "--find-links", "trusted-host": "--allow-insecure-host"}
last = {}
for line in sys.stdin:
    key, _, value = line.rstrip("\n").partition("=")
    scope, _, option = key.rpartition(".")
    if scope in ("global", "install", ":env:"):  # in the order in which they override each other
        last[option] = ast.literal_eval(value)
for option, flag in plain.items():
    for value in last.get(option, "").split():
        print(flag, value, sep="\n")
if last.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
    print("--no-index")
'
}

# fill_venv DIR REQUIREMENT...: install the requirements with uv, then this checkout as editable,
# unless just that was done before.
fill_venv() {
    local venv=$1 python=$1/bin/python stamp options=()
    shift
    stamp=$(printf '%s\n' "$("$python" -VV)" "$@" | cat - pyproject.toml scripts/environment.sh |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ "$(cat "$venv/.filled" 2>/dev/null)" = "$stamp" ]; then return; fi
    rm -f "$venv/.filled"
    say "filling $venv"
    "$python" -m pip install --quiet --upgrade pip setuptools 'uv>=0.8'
    mapfile -t options < <(uv_index_options "$venv")
    # As pip has it: every index counts, and a CPU build (X+cpu) comes before the plain X.
    options+=(--python "$python" --index-strategy unsafe-best-match)
    export UV_CACHE_DIR=$venv/.cache/uv
    printf '%s\n' "$@" >"$venv/requirements.in"
    resolve "$venv" "${options[@]}"
    "$python" -m uv pip install --quiet "${options[@]}" -r "$venv/requirements.txt"
    "$python" -m uv pip install --quiet "${options[@]}" --no-deps --editable .
    printf '%s\n' "$stamp" >"$venv/.filled"
}

# resolve DIR OPTION...: requirements.in -> requirements.txt, never with gigabytes of CUDA.
resolve() {
    local venv=$1 cuda
    shift
    resolve_once "$venv" "$@" || fail 'the requirements could not be resolved, as said above' \
        "they are in $venv/requirements.in"
    if grep -Eq '^(nvidia|cuda|triton)\b' "$venv/requirements.txt"; then
        say 'the configured indexes lead to a CUDA build of torch: asking for the CPU build'
        resolve_once "$venv" "$@" --torch-backend cpu || say 'it could not be had, as said above'
    fi
    if cuda=$(grep -E '^(nvidia|cuda|triton)\b' "$venv/requirements.txt"); then
        fail 'only a CUDA build of torch can be had, which pulls these:' "${cuda//$'\n'/ }" \
            'give pip an index or a find-links folder with the CPU build (pip config set ...)'
    fi
}

resolve_once() {
    local venv=$1
    shift
    "$venv/bin/python" -m uv pip compile --quiet "$@" "$venv/requirements.in" \
        --output-file "$venv/requirements.txt"
}

# extras DIR NAME...: the requirements of this checkout and of its named extras, one a line.
extras() {
    "$1/bin/python" - "${@:2}" <<'PYTHON'
import re, sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
groups = project["optional-dependencies"]
wanted, seen = list(sys.argv[1:]), set()
found = list(project["dependencies"])
while wanted:
    extra = wanted.pop()
    if extra in seen:
        continue
    seen.add(extra)
    for line in groups[extra]:
        own = re.fullmatch(re.escape(project["name"]) + r"\[(.+)\]", line.replace(" ", ""))
        if own:
            wanted += own[1].split(",")
        else:
            found.append(line)
print("\n".join(sorted(set(found))))
PYTHON
}
