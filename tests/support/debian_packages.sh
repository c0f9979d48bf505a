# Debian packages that tests need: the install.sh of tests/rig and of tests/slurm source this.

# Print those of these packages that are not installed.
missing_packages() {
    local package
    for package in "$@"; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
    done
}

# Exit, and name these packages, unless we are root.
must_be_root() {
    [ "$(id -u)" = 0 ] || { echo "as root: apt-get install $*" >&2; exit 1; }
}

# Install these packages. Services stay off: tests start daemons of their own.
install_packages() {
    [ $# -gt 0 ] || return 0
    must_be_root "$@"
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then # invoke-rc.d asks it before it starts a service
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap "rm -f $policy" EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
