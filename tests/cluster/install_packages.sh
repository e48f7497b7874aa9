#!/usr/bin/env bash
# Installs what a virtual SLURM cluster needs, on Debian or Ubuntu, as root. Elsewhere it says what is missing, and ends
# well: the tests of the cluster then skip themselves. Starts nothing.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2 libpmix-dev)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]} == 0)); then exit; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    echo "cluster tests: not installed: ${missing[*]}; that takes root and apt-get"
    exit
fi
echo "cluster tests: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Packages would start their services; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
fi
{ apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } > /dev/null ||
    echo "cluster tests: apt-get did not install them"
