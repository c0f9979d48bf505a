#!/usr/bin/env bash
# Debian packages for tests/rig: a Docker Engine, network namespaces, a base image and a registry without the internet.
# For root; does nothing where all is there already. Services stay off: the rig starts daemons of its own.
set -euo pipefail
packages=(docker.io iptables iproute2 util-linux openssl openssh-client openssh-server mmdebstrap docker-registry)
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
composes=(/usr{,/local}/{lib,libexec}/docker/cli-plugins/docker-compose "$HOME/.docker/cli-plugins/docker-compose")
compose=$(ls "${composes[@]}" 2>/dev/null || true)
[ ${#missing[@]} -gt 0 ] || [ -z "$compose" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "as root: apt-get install ${missing[*]} docker-compose" >&2; exit 1; }
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then # invoke-rc.d asks it before it starts a service
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
# Where this machine's apt has Debian's packages from; only sources that were updated tell their label.
debian_source() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sort -u | sed -n 1p; }
# Debian 12 has no Compose 2: the one program from Debian 13's package, and nothing else of that release.
fetch_compose() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg source folder
    source=$(debian_source)
    [ -n "$source" ] || { apt-get update -qq && source=$(debian_source); }
    [ -n "$source" ] || { echo "apt has no source of Debian's packages" >&2; return 1; }
    folder=$(mktemp -d) && mkdir -p "$folder"/{lists,archives}/partial && cd "$folder" || return 1
    echo "deb [signed-by=$keyring] $source trixie main" >sources.list
    local here=(-o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=-
        -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache::Archives=$folder/archives"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    apt-get "${here[@]}" update -qq && apt-get "${here[@]}" download -qq docker-compose \
        && dpkg-deb -x docker-compose_*.deb . \
        && install -D usr/libexec/docker/cli-plugins/docker-compose /usr/local/lib/docker/cli-plugins/docker-compose
    local code=$?
    rm -rf "$folder"
    return $code
}
[ -n "$compose" ] || fetch_compose || echo "no Docker Compose: tests/rig/test_compose_stack.py will be skipped" >&2
