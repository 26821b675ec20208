#!/bin/sh
# What `make test-launchers` needs of the system: Slurm with munge, Open MPI, MPICH, and namespaces. Debian and Ubuntu.
set -eu
programs="slurmctld slurmd srun munged mpirun.openmpi mpiexec.hydra ip unshare setpriv"
missing=""
for program in $programs; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "make test-launchers installs$missing with apt-get, which needs root; run it as root, or install them first" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "make test-launchers needs$missing, and knows only apt-get to install them; install them first" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin mpich iproute2 util-linux >/dev/null
