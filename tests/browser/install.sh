#!/bin/sh
# What `make test-browser` needs of the system: a browser, and letters for it to draw. Debian and Ubuntu.
set -eu
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "make test-browser installs chromium with apt-get, which needs root; run it as root, or install it first" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "make test-browser needs chromium, and knows only apt-get to install it; install it first" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
