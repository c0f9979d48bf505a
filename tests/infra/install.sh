#!/usr/bin/env bash
# Prometheus, for the test of the dashboard. For root; does nothing where there is one.
set -euo pipefail
command -v prometheus >/dev/null && exit 0
[ "$(id -u)" = 0 ] || { echo "as root: apt-get install prometheus" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends prometheus >/dev/null
