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
# The tests start what they need, and end it: no service is started here.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin mpich iproute2 util-linux >/dev/null
