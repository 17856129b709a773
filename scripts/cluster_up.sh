# Sourced by scripts/cluster: everything that starts a cluster.
# shellcheck shell=bash
# What is not assigned here is set by scripts/cluster: the cluster's name and what follows from it,
# and the options of up.
# shellcheck disable=SC2154

# Programs, and the Debian package of each.
programs=(slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge ip:iproute2
    unshare:util-linux nsenter:util-linux setpriv:util-linux flock:util-linux)

need_programs() {
    local entry missing=() packages=() needed=("${programs[@]}")
    if [ "$kind" = ssh ]; then needed=("${ssh_programs[@]}"); fi
    for entry in "${needed[@]}"; do
        if ! command -v "${entry%%:*}" >/dev/null; then
            missing+=("${entry%%:*}")
            packages+=("${entry##*:}")
        fi
    done
    if [ ${#missing[@]} -gt 0 ]; then
        mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
        fail "not found: ${missing[*]}" "on Debian and Ubuntu: apt-get install ${packages[*]}"
    fi
}

need_namespaces() {
    local said
    [ -e /etc/hosts ] || fail 'this machine has no /etc/hosts: make an empty one (touch /etc/hosts)'
    if ! said=$(unshare --net --mount --uts --ipc --pid --fork \
        mount -n -t tmpfs tmpfs /tmp 2>&1); then
        fail "this machine does not let root make namespaces and mounts: $said" \
            'in a container: it needs the capabilities SYS_ADMIN and NET_ADMIN (--privileged)'
    fi
}

# Prints the first three numbers of an unused /24.
free_subnet() {
    local third taken
    taken=$(ip -4 -o addr show; ip -4 route show)
    for third in {0..255}; do
        if [[ $taken != *10.213.$third.* ]]; then
            printf '10.213.%d\n' "$third"
            return
        fi
    done
    fail 'no free subnet: 10.213.0.0/24 to 10.213.255.0/24 are all in use on this machine'
}

# Writes slurm.conf and what goes with it.
write_conf() {
    local node login subnet memory release cgroup=cgroup/v1
    subnet=$(cat "$state/subnet")
    login=$(uname -n)
    login=${login%%.*}
    memory=$(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
    {
        printf '127.0.0.1 localhost\n%s.1 %s\n' "$subnet" "$login"
        for node in $(nodes); do printf '%s %s\n' "$(address_of "$node")" "$node"; done
    } >"$state/hosts"
    if [ "$kind" = ssh ]; then write_ssh; return; fi
    # No plugin in use needs cgroups; but left to itself slurmd looks for them, and a container may
    # have none. Since 24.05 slurmd can be told so; before, it takes v1 at its word.
    release=$(slurmctld -V) # slurm-wlm 22.05.8
    if [[ $release =~ ([0-9]+)\.([0-9]+) && ${BASH_REMATCH[1]}${BASH_REMATCH[2]} -ge 2405 ]]; then
        cgroup=disabled
    fi
    printf 'CgroupPlugin=%s\n' "$cgroup" >"$state/cgroup.conf"
    cat >"$conf.new" <<CONF
ClusterName=$name
SlurmctldHost=$login($subnet.1)
# A port of its own: the controllers of all clusters share the login side's network.
SlurmctldPort=$((26817 + ${subnet##*.}))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
StateSaveLocation=$state/controller
SlurmctldPidFile=$state/slurmctld.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdSpoolDir=$state/%n/spool
SlurmdPidFile=$state/%n/slurmd.pid
SlurmdLogFile=$state/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Lets a node claim CPUs that the machine does not have.
SlurmdParameters=config_overrides
# A dead slurmd shows in about 25 s, of which ten and more are MessageTimeout's; that stays as it
# is, for this machine may be busy. A node that comes back is used again at once.
SlurmdTimeout=10
ReturnToService=2
# The time from SIGTERM to SIGKILL: Slurm's own, which the grace period of ranks is made for.
KillWait=30
# A node on which a process has not ended after this time is drained.
UnkillableStepTimeout=180
# An salloc or srun that was killed gives its nodes back, after twice that at most.
InactiveLimit=60
JobRequeue=1
# Tests wait for jobs to start: look at the queue every few seconds, not every minute.
SchedulerParameters=sched_interval=3,bf_interval=3,batch_sched_delay=0
CONF
    for node in $(nodes); do
        printf 'NodeName=%s NodeAddr=%s CPUs=%d RealMemory=%d State=UNKNOWN\n' \
            "$node" "$(address_of "$node")" "$cpus" "$memory"
    done >>"$conf.new"
    printf 'PartitionName=torch Nodes=%s Default=YES MaxTime=INFINITE State=UP\n' \
        "$(nodes | paste -sd,)" >>"$conf.new"
    mv "$conf.new" "$conf"
}

# become COMMAND...: exec it without the caller's variables, terminal, directory and open files: what
# stands for hours would keep a lock of `flock FILE scripts/cluster up`, or a pipe, for as long.
become() {
    local descriptor
    cd /
    for descriptor in "/proc/$BASHPID/fd"/*; do
        descriptor=${descriptor##*/}
        if [ "$descriptor" -gt 2 ]; then exec {descriptor}>&-; fi
    done
    exec env -i PATH="$PATH" LANG=C.UTF-8 setsid "$@" </dev/null >>"$state/up.log" 2>&1
}

start_munge() {
    local place=$state/munge
    if [ -n "$(munge_daemon)" ]; then return; fi
    install -d -o munge -g munge -m 0755 "$place"
    if [ ! -e "$place/key" ]; then
        (umask 077 && head -c 128 /dev/urandom >"$place/key")
        chown munge:munge "$place/key"
    fi
    (become setpriv --reuid=munge --regid=munge --clear-groups munged --force \
        "--socket=$place/socket" "--key-file=$place/key" "--pid-file=$place/pid" \
        "--log-file=$place/log" "--seed-file=$place/seed") ||
        give_up "munged did not start" "$place/log" "$state/up.log"
}

start_controller() {
    if [ -n "$(controller)" ]; then return; fi
    mkdir -p "$state/controller"
    (become slurmctld -f "$conf") ||
        give_up 'slurmctld did not start' "$state/slurmctld.log" "$state/up.log"
}

# The first process of a node, inside its namespaces; never returns.
node_init() {
    local host path
    state=$1
    # /proc is still the login side's, so this is our number there.
    read -r host _ </proc/self/stat
    hostname "$2"
    while read -r path; do mount -n -t tmpfs -o mode=0755 hidden "$path"; done <"$state/hidden"
    mount -n --bind "$state/hosts" /etc/hosts
    mount -n -t proc proc /proc
    # /sys/class/net must show this node's interfaces, and the cgroups must stay where they are.
    mount -n --rbind /sys /tmp
    if mount -n -t sysfs sysfs /sys 2>/dev/null && [ -d /tmp/fs/cgroup ]; then
        mount -n --rbind /tmp/fs/cgroup /sys/fs/cgroup
    fi
    umount -n -l /tmp
    mount -n -t tmpfs -o mode=1777 tmp /tmp
    mount -n -t tmpfs -o mode=1777 shm /dev/shm
    printf '%s\n' "$host" >"$state/$2/init"
    # As process 1 it inherits the orphans of jobs: bash reaps them while it waits.
    while :; do
        sleep infinity &
        wait $! || true
    done
}

start_node() {
    local node=$1 made=$state/$1/made
    # Without the mark it was lost, or an up was killed while it made the node.
    if [ -z "$(init_of "$node")" ] || [ ! -e "$made" ]; then
        end_nodes "$node" || give_up "what is left of $node cannot be ended"
        mkdir -p "$state/$node/spool"
        rm -f "$state/$node/init" "$made"
        become unshare --net --mount --uts --ipc --pid --fork --kill-child \
            bash "$self" node-init "$state" "$node" &
        wait_for "$patience" test -s "$state/$node/init" ||
            give_up "$node could not be made" "$state/up.log"
        connect "$node" "$(cat "$state/$node/init")" 2>>"$state/up.log" ||
            give_up "$node could not be connected to the bridge $bridge" "$state/up.log"
        touch "$made"
    fi
    start_daemon "$node"
}

# It is waited for, as "stop" must find it: what starts a daemon ends before that has its name.
start_daemon() {
    local program=sshd
    if [ "$kind" = slurm ]; then program=slurmd; fi
    "start_$program" "$1"
    wait_for "$patience" runs "${program}_of" "$1" ||
        give_up "$program has ended on $1" "$state/$1/$program.log" "$state/up.log"
}

# shellcheck disable=SC2329
runs() { [ -n "$("$@")" ]; }

# connect NODE PID: give the node its only interface, without a route to anything but its subnet.
# Its hardware address follows from the other one: a host that comes back has the one it had, and
# others send to it at once.
connect() {
    local link=${bridge}n${1#node} hardware numbers
    IFS=. read -ra numbers <<<"$(address_of "$1")"
    hardware=02:00$(printf ':%02x' "${numbers[@]}")
    ip link delete "$link" 2>/dev/null || true
    ip link add "$link" type veth peer name eth0 address "$hardware" netns "$2" &&
        ip link set "$link" master "$bridge" up &&
        inside "$1" ip address add "$(address_of "$1")/24" dev eth0 &&
        inside "$1" ip link set eth0 up &&
        inside "$1" ip link set lo up
}

start_slurmd() {
    if [ -n "$(slurmd_of "$1")" ]; then return; fi
    (become nsenter --target "$(init_of "$1")" --mount --uts --ipc --net --pid \
        slurmd -f "$conf" -N "$1") ||
        give_up "slurmd did not start on $1" "$state/$1/slurmd.log" "$state/up.log"
}

# give_up MESSAGE LOG...: fail with the ends of the logs; up's trap then removes what there is.
give_up() {
    local message=$1 log lines=()
    shift
    for log in "$@"; do
        if [ -s "$log" ]; then
            lines+=("the end of $log:")
            mapfile -t -O ${#lines[@]} lines < <(tail -n 8 "$log")
        fi
    done
    fail "cluster $name: $message" "${lines[@]}"
}

# Called by name, as are more below.
# shellcheck disable=SC2329
all_usable() {
    local states
    states=$(slurm sinfo --noheader --Node --format '%T' 2>/dev/null) || return 1
    [ -n "$states" ] && ! grep -qvx 'idle\|mixed\|allocated\|planned\|completing' <<<"$states"
}

wait_until_usable() {
    local node logs=("$state/slurmctld.log")
    for node in $(nodes); do logs+=("$state/$node/slurmd.log"); done
    wait_for "$patience" all_usable ||
        give_up "the nodes cannot be used after $patience s: $(slurm sinfo -h -N -o '%N %T' 2>&1 |
            paste -sd ' ')" "${logs[@]}"
    try_network
    try_job "${logs[@]}"
}

# shellcheck disable=SC2329
connects() { inside "$1" timeout 10 bash -c ": </dev/tcp/$2/6818" 2>/dev/null; }

# Every node connects to the last one's slurmd: what a job does, and a firewall may forbid.
try_network() {
    local node last address
    last=$(nodes | tail -n 1)
    address=$(address_of "$last")
    for node in $(nodes); do
        wait_for "$patience" connects "$node" "$address" ||
            fail "cluster $name: $node cannot connect to $last at $address, port 6818" \
                'a firewall of this machine may filter what crosses bridges; Docker sets one up' \
                'let this bridge pass, it keeps its name, and start the cluster again:' \
                "iptables -I FORWARD -i $bridge -o $bridge -j ACCEPT"
    done
}

try_job() {
    local said
    if slurm sinfo -h -N -o %T | grep -qvx idle; then return; fi # jobs run: ours would wait
    said=$(slurm srun --nodes="$(nodes | wc -l)" --ntasks-per-node=1 --immediate="$patience" \
        --chdir=/ --job-name=cluster-up hostname 2>&1 9>&-) ||
        give_up "srun does not work: $said" "$@"
    [ "$(sort <<<"$said")" = "$(nodes)" ] || give_up "srun on all nodes printed: $said" "$@"
}

make_files() {
    mkdir -p "$state"
    printf '%s\n' "$1" >"$state/shape"
    printf '%s\n' "${hidden[@]}" | sed '/^$/d' >"$state/hidden"
    seq -f 'node%02g' "$count" >"$state/nodes"
    free_subnet >"$state/subnet"
    {
        ip link add "$bridge" type bridge &&
            ip address add "$(cat "$state/subnet").1/24" dev "$bridge" &&
            ip link set "$bridge" up
    } 2>>"$state/up.log" || give_up "the bridge $bridge could not be made" "$state/up.log"
    write_conf
}

check_hidden() {
    local path
    for path in "${hidden[@]}"; do
        [ -d "$path" ] || fail "--hide $path: no such directory"
        if [[ $state/ == "${path%/}"/* ]]; then
            fail "--hide $path: the nodes need what is in it, $state" 'hide a directory below it'
        fi
    done
}

# So that Slurm's commands find the default cluster by themselves; never in the way of another one.
link_conf() {
    local link=/etc/slurm/slurm.conf
    if [ "$name" = stager ] && [ -d /etc/slurm ] && [ ! -e "$link" ] && [ ! -L "$link" ]; then
        ln -s "$conf" "$link"
    fi
}

up() {
    local node shape ssh=
    need_programs
    need_namespaces
    check_hidden
    lock
    if [ "$kind" = ssh ]; then ssh='--ssh '; fi
    shape="$ssh--nodes $count --cpus $cpus${hidden[*]/#/ --hide }"
    if [ -e "$conf" ]; then
        if [ "$shape" != "$(cat "$state/shape")" ] && [ -n "$shape_given" ]; then
            fail "cluster $name is up already, with other options: $(cat "$state/shape")" \
                "scripts/cluster down --name $name, then up again; or choose another --name"
        fi
    else
        dismantle # what an up that was killed left
        trap 'if [ $? -ne 0 ]; then trap "" PIPE INT TERM HUP; dismantle; fi' EXIT
        trap 'exit 130' INT TERM HUP
        make_files "$shape"
    fi
    if [ "$kind" = slurm ]; then
        start_munge
        start_controller
    fi
    for node in $(nodes); do start_node "$node"; done
    if [ "$kind" = ssh ]; then wait_for_logins; else wait_until_usable; fi
    trap - EXIT INT TERM HUP # it stands: nothing below can be a reason to remove it
    if [ "$kind" = ssh ]; then
        say "cluster $name is up: $(nodes | paste -sd ' '), each with an sshd of its own"
        say "in each shell that is to use it: export PATH=$state/bin:\$PATH"
        return
    fi
    link_conf
    say "cluster $name is up: $(nodes | paste -sd ' '), partition torch"
    if [ "$(readlink /etc/slurm/slurm.conf 2>/dev/null)" = "$conf" ]; then
        say 'srun, sbatch and salloc find it by themselves (/etc/slurm/slurm.conf)'
    else
        say "in each shell that is to use it: export SLURM_CONF=$conf"
    fi
}
