"""A stand-in for Apptainer, which no Debian package brings: it enters a root of its own.

Inside there are the system's own programs, as an image would have them, the image as ``/.image``,
and what is bound: neither ``/tmp`` nor the home, as on a site that has switched these off. So what
a job needs and does not bind is missing. Like the real one it passes variables on, except ``PATH``
and ``LD_LIBRARY_PATH``, becomes the program, and ends with 255 where it cannot.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.needs import needs

PROGRAM = """\
#!/bin/sh
# apptainer exec --pwd / [--nv] --bind A,B:C IMAGE PROGRAM ARGUMENTS...
fail() { echo "FATAL: $1" >&2; exit 255; }
[ "$1 $2 $3" = "exec --pwd /" ] || fail "unexpected: $*"
shift 3
[ "$1" != --nv ] || shift
[ "$1" = --bind ] || fail "unexpected: $*"
export BINDS="$2" IMAGE="$3"
shift 3
exec unshare --mount /bin/sh -ec '
    root=/mnt
    mount -t tmpfs none "$root"
    cd "$root"
    for name in usr etc dev proc sys; do mkdir $name; mount --rbind /$name $name; done
    for name in bin sbin lib lib64; do ln -s usr/$name $name; done
    place() { if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}"; : >"$2"; fi; }
    place "$IMAGE" ./.image
    mount --bind "$IMAGE" .image
    old=$IFS; IFS=,; set -f
    for bind in $BINDS; do
        IFS=:; set -- $bind "" -- "$@"; IFS=$old
        from=$1 to=${2:-$1}
        while [ "$1" != -- ]; do shift; done; shift
        [ -e "$from" ] || { echo "FATAL: mount source $from does not exist" >&2; exit 255; }
        place "$from" ".$to"
        mount --rbind "$from" ".$to"
    done
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    unset LD_LIBRARY_PATH BINDS
    exec chroot "$root" /usr/bin/env -C / "$@"
' sh "$@"
"""
INSIDE = "/.image"  # the image, as a program in the container sees it


def stand_in(folder: Path, name: str = "apptainer") -> Path:
    needs("namespaces")
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return folder
