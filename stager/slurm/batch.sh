#!/bin/bash
#@ The batch script, filled in by script.py. Lines that begin with "#@", and those for shellcheck, are
#@ left out of it; lines between "#@if CASE" and "#@end" are kept only in that case; and a word
#@ between two at signs is replaced by the value of that name.
@directives@
#
@purpose@
#
# Written by stager @version@. The nodes do not need stager; bash, coreutils, gzip and Python 3.9 or
# newer are enough. Only the first node runs this script. It starts the driver there, which
# reaches the others through srun and sbcast: it checks every node, brings the bundle to the local
#@if run
# disks that lack it, unpacks, probes, and launches the ranks.
#@end
#@if verify
# disks that lack it, unpacks, probes and reports.
#@end
#
@facts@
#
# The first node must be able to read the bundle. Where it cannot, run `stager run` without
# --batch instead: through salloc the driver runs on the login node and sends the bundle from
# there. Logs are written by the first node, to a directory of its own if it cannot see yours;
# Slurm itself writes none, because it would drop a job whose log it cannot open.
#@if requeue
#
# @warning_seconds@ s before the time limit Slurm sends USR1: the driver ends the ranks with TERM and collects
# the results, and the job goes back into the queue, at most @most_restarts@ times. The training script must
# resume from its own checkpoint.
#@end

set -euo pipefail

# What differs from one job to the next.
#@if from_bundle
bundle=@bundle@
bundle_id=@bundle_id@
#@end
name=@name@
log_dir=@log_dir@
log_umask=@log_umask@
program_sha256=@program_sha256@
# Pythons to try, in this order; the driver runs on any of version 3.9 or newer.
pythons=(
@pythons@
)
#@if requeue
# How often the job goes back into the queue at most; it shall not circle for ever.
most_restarts=@most_restarts@
#@end

say() { printf 'stager: %s\n' "$*"; }
fail() {
    printf 'stager: %s: %s\n' "$(uname -n)" "$1" >&2
    exit 3
}

# The log: Slurm opens none, as it drops a job without a word where it cannot (see above). Run by
# hand, or with another --output, the script writes where it was told to. What ranks print may hold
# secrets: only log_umask decides who reads it, and the ranks keep the umask that they came with.
open_log() {
    local log="$log_dir/$name.${SLURM_JOB_ID:-none}.batch.out"
    if ! [ /dev/stdout -ef /dev/null ]; then return; fi
    if (umask "$log_umask" && mkdir -p -- "$log_dir" && : >>"$log"); then
        if [ "$log_umask" = 027 ] && ! chgrp -f --reference="$log_dir" -- "$log"; then
            chmod g= -- "$log"
        fi
        exec >>"$log" 2>&1
    else # it shows in `scontrol show job`, where else
        scontrol update "JobId=${SLURM_JOB_ID:-}" \
            "Comment=stager: $(uname -n) cannot write $log; name another place with --log-dir"
        exit 3
    fi
}

# A private directory for the program and the job, removed at the end. A full or missing temporary
# directory is passed over. The shell, too, keeps a long here-document in TMPDIR.
work=
clean_up() { if [ -n "$work" ]; then rm -rf -- "$work"; fi; }
trap clean_up EXIT

make_place() {
    local folder
    for folder in "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp /dev/shm; do
        if [ -z "$folder" ]; then continue; fi
        work=$(mktemp -d "$folder/stager-batch.XXXXXXXX" 2>/dev/null) || continue
        if fill_place; then return; fi
        clean_up
        work=
    done
    fail "no room for the program (1 MB) in \$SLURM_TMPDIR, \$TMPDIR, /tmp or /dev/shm; \
make some, or leave this node out with --exclude=$(uname -n)"
}

fill_place() {
    local TMPDIR=$work
    node_program >"$work/node.pyz" && job_description >"$work/job.json" || return 1
    if ! printf '%s  %s\n' "$program_sha256" "$work/node.pyz" | sha256sum --check --status; then
        fail "the program is damaged: its sha256 is not $program_sha256; make the script again"
    fi
}

find_python() {
    local candidate
    for candidate in "${pythons[@]}" /usr/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3; do
        if "$candidate" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' &>/dev/null; then
            python=$candidate
            return
        fi
    done
    fail "no Python 3.9 or newer was found (tried ${pythons[*]}); put one on PATH before sbatch \
(module load, conda), or leave this node out with --exclude=$(uname -n)"
}

# What Slurm tells this script, it tells the driver, which then ends every rank and collects.
driver=
told=
forward() {
    told=$1
    if [ -n "$driver" ]; then kill -s TERM "$driver" 2>/dev/null || :; fi
}
# Signals that are for the ranks: programs write a checkpoint on them.
# shellcheck disable=SC2329 # traps call it
pass_on() {
    if [ -n "$driver" ]; then kill -s "$1" "$driver" 2>/dev/null || :; fi
}
trap 'forward TERM' TERM
trap 'forward INT' INT
trap 'pass_on USR1' USR1
trap 'pass_on USR2' USR2
#@if requeue
trap 'forward USR1' USR1 # Slurm's warning before the time limit
#@end

# Its exit status is the driver's: 0, 3 (the job or a node failed), 130 (it was told to end).
drive() {
    (
        trap '' USR1 USR2 # until it can pass them on
        exec "$python" -I -S "$work/node.pyz" drive "$work/job.json"
    ) &
    driver=$!
    if [ -n "$told" ]; then forward "$told"; fi # it came before there was a driver
    while kill -0 "$driver" 2>/dev/null; do wait "$driver" || :; done # a signal ends a wait early
    wait "$driver"
}

#@if requeue
back_into_the_queue() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    if [ "$restarts" -ge "$most_restarts" ]; then
        fail "the time limit came near for the ${restarts}th time; the job is not queued again"
    fi
    say "the time limit is near: back into the queue (restart $((restarts + 1)))"
    clean_up
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm did not queue the job again"
}

#@end
main() {
    local status=0
    open_log
    make_place
    find_python
    say "job ${SLURM_JOB_ID:-none} restart ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-?}: \
driver on $(uname -n), logs in $log_dir"
    drive || status=$?
#@if requeue
    if [ "$told" = USR1 ] && [ "$status" -eq 130 ]; then back_into_the_queue; fi
#@end
    exit "$status"
}

#@if embed
# The far side's program, a Python zip application.
# shellcheck disable=SC2329 # a script has only one of the two
node_program() {
    base64 -d <<'END_OF_PROGRAM' | gzip -d
@program_base64@
END_OF_PROGRAM
}
#@end
#@if from_bundle
# The far side's program, a Python zip application, out of the bundle, which is a plain tar. The id
# of a bundle is the digest of its manifest without the id itself.
node_program() {
    local found
    if [ ! -r "$bundle" ]; then
        fail "the bundle $bundle cannot be read from this node; put it on a file system that this \
node sees, or use \`stager run\` without --batch, which sends it from the login node"
    fi
    found=$(tar -xOf "$bundle" manifest.json | sed 's/"id":"[0-9a-f]*",//' | sha256sum) || found=
    if [ "${found%% *}" != "$bundle_id" ]; then
        fail "$bundle is another bundle than the one this script was made for, which has the id $bundle_id; make the script again, or put that bundle back"
    fi
    tar -xOf "$bundle" node.pyz
}
#@end

# The job, as bundle/protocol/job.py in the program describes it.
job_description() {
    cat <<'END_OF_JOB'
@job_json@
END_OF_JOB
}

main
