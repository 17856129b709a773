# Sourced by scripts/test: runs programs beside each other, and tells at the end what they said.
# shellcheck shell=bash disable=SC2034

# What each of them writes is in $beside/NAME until the end.
beside=$(mktemp -d)
beside_pids=()
beside_names=()
set -m # so that Ctrl-C reaches those in the background as well, and they tidy up
trap end_beside EXIT

# start_beside NAME PROGRAM ARGUMENT...: in the background.
start_beside() {
    local name=$1
    shift
    "$@" >"$beside/$name" 2>&1 &
    beside_pids+=($!)
    beside_names+=("$name")
}

# wait_beside: until all of them have ended; shows what they wrote, in the order of their start.
# Sets beside_status: the exit status of each, by its name.
declare -A beside_status
wait_beside() {
    local each status
    for each in "${!beside_pids[@]}"; do
        status=0
        wait "${beside_pids[$each]}" || status=$?
        beside_status[${beside_names[$each]}]=$status
    done
    for each in "${beside_names[@]}"; do cat "$beside/$each"; done
    beside_pids=()
    beside_names=()
}

# Whatever ends the script ends those beside it. Under `set -e` a command that fails in a trap
# becomes the exit status of the script, and `kill` fails once nobody is left.
end_beside() {
    if [ ${#beside_pids[@]} -gt 0 ]; then kill -INT "${beside_pids[@]}" 2>/dev/null || true; fi
    wait || true
    rm -rf "$beside" || true # whoever still writes there, or holds it, is no failure of a test
}
