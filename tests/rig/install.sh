#!/usr/bin/env bash
# Debian packages for tests/rig: a Docker Engine, network namespaces, a base image and a registry without the internet.
# For root; does nothing where all is there already. Services stay off: the rig starts daemons of its own.
set -euo pipefail
packages=(docker.io iptables iproute2 util-linux openssl openssh-client openssh-server mmdebstrap docker-registry)
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
