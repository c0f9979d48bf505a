#!/usr/bin/env bash
# Debian packages for tests/slurm: Slurm's controller, node daemon and commands, and munge. For root; does nothing where
# they are there already. Services stay off: tests/support/slurm_cluster.py starts daemons of its own.
set -euo pipefail
. "$(dirname "$0")/../support/debian_packages.sh"
mapfile -t missing < <(missing_packages slurm-wlm munge)
install_packages "${missing[@]}"
