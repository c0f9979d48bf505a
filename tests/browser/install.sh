#!/usr/bin/env bash
# Chromium, for the tests of pages. For root; does nothing where there is one.
set -euo pipefail
command -v chromium >/dev/null || command -v chromium-browser >/dev/null && exit 0
[ "$(id -u)" = 0 ] || { echo "as root: apt-get install chromium" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
