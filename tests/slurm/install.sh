#!/usr/bin/env bash
# Debian packages for tests/slurm: Slurm's controller, node daemon and commands, and munge. For root; does nothing where
# they are there already. Services stay off: tests/support/slurm_cluster.py starts daemons of its own.
set -euo pipefail
packages=(slurm-wlm munge)
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || { echo "as root: apt-get install ${missing[*]}" >&2; exit 1; }
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then # invoke-rc.d asks it before it starts a service
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
