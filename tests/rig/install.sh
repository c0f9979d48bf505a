#!/usr/bin/env bash
# Debian packages for tests/rig: a Docker Engine, network namespaces, a base image and a registry without the internet.
# For root; does nothing where all is there already. Services stay off: the rig starts daemons of its own.
set -euo pipefail
. "$(dirname "$0")/../support/debian_packages.sh"
mapfile -t missing < <(missing_packages \
    docker.io iptables iproute2 util-linux openssl openssh-client openssh-server mmdebstrap docker-registry)
composes=(/usr{,/local}/{lib,libexec}/docker/cli-plugins/docker-compose "$HOME/.docker/cli-plugins/docker-compose")
compose=$(ls "${composes[@]}" 2>/dev/null || true)
[ ${#missing[@]} -gt 0 ] || [ -z "$compose" ] || exit 0
must_be_root "${missing[@]}" docker-compose
install_packages "${missing[@]}"
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
