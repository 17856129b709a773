# Sourced by scripts/test: parts of the test suite that run beside each other, each a pytest, the
# array $pytest, that notes what failed in a cache of its own.
# shellcheck shell=bash disable=SC2154
# shellcheck source=scripts/beside.sh
source "$(dirname "${BASH_SOURCE[0]}")/beside.sh"

# start_part NAME ARGUMENT...: in the background.
start_part() {
    local name=$1
    shift
    start_beside "$name" "${pytest[@]}" -o "cache_dir=$beside/cache/$name" "$@"
}

# run_part NAME ARGUMENT...: in the foreground, while the others run.
run_part() {
    local name=$1 status=0
    shift
    "${pytest[@]}" -o "cache_dir=$beside/cache/$name" "$@" || status=$?
    beside_status[$name]=$status
}

# judge_parts: waits for all and returns the status of the whole. A machine that is as busy as the
# parts make it shows races that nothing else does. Each is a defect to mend and is told, but it
# does not keep out a change that has nothing to do with it: what passes alone counts as passed.
judge_parts() {
    local part status=0
    wait_beside
    for part in "${!beside_status[@]}"; do
        case ${beside_status[$part]} in
            0) ;;
            1) passes_alone "$part" || status=1 ;; # tests failed
            *) status=${beside_status[$part]} ;;
        esac
    done
    return "$status"
}

# passes_alone NAME: whether the few tests that failed in a part pass now, with nothing beside them.
passes_alone() {
    local cache=$beside/cache/$1 failed files
    failed=$(grep -o '"tests/.*"' "$cache/v/cache/lastfailed") || return 1
    if [ "$(wc -l <<<"$failed")" -gt 5 ]; then return 1; fi
    say "failed in $1, and run once more with nothing beside them:" "$failed"
    # Only their files: of a test whose name is another one each time, pytest finds nothing that
    # failed, and would run all there is.
    mapfile -t files < <(sed 's/^"\(tests\/[^:]*\).*/\1/' <<<"$failed" | sort -u)
    "${pytest[@]}" -o "cache_dir=$cache" --last-failed --last-failed-no-failures none \
        "${files[@]}" || return 1
    say 'they passed alone: a race, to be mended'
}
