# Sourced by scripts/cluster: hosts without Slurm, each with an sshd of its own.
# shellcheck shell=bash
# What is not assigned here is set by scripts/cluster.
# shellcheck disable=SC2154

# shellcheck disable=SC2034 # cluster_up.sh reads it
ssh_programs=(sshd:openssh-server ssh:openssh-client ip:iproute2 unshare:util-linux
    nsenter:util-linux flock:util-linux)

# The key of the login side, and a configuration that only this cluster's ssh reads: neither the
# user's own configuration nor known hosts are touched.
write_ssh() {
    local node folder
    ssh-keygen -q -t ed25519 -N '' -C stager-cluster -f "$state/key"
    mkdir -p "$state/bin" /run/sshd
    : >"$state/known_hosts"
    for node in $(nodes); do
        folder=$state/$node
        mkdir -p "$folder"
        ssh-keygen -q -t ed25519 -N '' -C "$node" -f "$folder/host_key"
        cp "$state/key.pub" "$folder/authorized_keys"
        printf '%s %s\n' "$node" "$(cut -d ' ' -f 1,2 "$folder/host_key.pub")" \
            >>"$state/known_hosts"
        cat >"$folder/sshd_config" <<CONF
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized_keys
PidFile $folder/sshd.pid
PermitRootLogin yes
PasswordAuthentication yes
# The key is in a folder that is not a home.
StrictModes no
UsePAM no
PrintMotd no
CONF
    done
    for node in $(nodes); do
        printf 'Host %s\n    HostName %s\n    HostKeyAlias %s\n' "$node" \
            "$(address_of "$node")" "$node"
    done >"$conf.new"
    cat >>"$conf.new" <<CONF
Host *
    IdentityFile $state/key
    IdentitiesOnly yes
    UserKnownHostsFile $state/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
CONF
    printf '#!/bin/sh\nexec %s -F %s "$@"\n' "$(command -v ssh)" "$conf" >"$state/bin/ssh"
    chmod +x "$state/bin/ssh"
    mv "$conf.new" "$conf"
}

# sshd_of NODE: the number of its sshd here. An sshd writes a title over its arguments.
sshd_of() {
    local entry title
    for entry in /proc/[0-9]*; do
        { IFS= read -r -d '' title <"$entry/cmdline"; } 2>/dev/null || continue
        if [[ $title == sshd:*" $state/$1/sshd_config "*listener* ]]; then
            printf '%s\n' "${entry#/proc/}"
        fi
    done
}

start_sshd() {
    local program
    if [ -n "$(sshd_of "$1")" ]; then return; fi
    program=$(command -v sshd) # sshd starts itself again, by its full path
    (become nsenter --target "$(init_of "$1")" --mount --uts --ipc --net --pid \
        "$program" -f "$state/$1/sshd_config" -E "$state/$1/sshd.log") ||
        give_up "sshd did not start on $1" "$state/$1/sshd.log" "$state/up.log"
}

# shellcheck disable=SC2329 # called by name
logs_in() { "$state/bin/ssh" -o BatchMode=yes "$1" true 2>>"$state/up.log" 9>&- </dev/null; }

wait_for_logins() {
    local node
    for node in $(nodes); do
        wait_for "$patience" logs_in "$node" ||
            give_up "nobody can log in to $node" "$state/$node/sshd.log" "$state/up.log"
    done
}
