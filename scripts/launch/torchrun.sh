#!/usr/bin/env bash
# Ranks by torchrun, of which every host runs one:
#
#   scripts/launch/torchrun.sh RANKS_PER_HOST SCRIPT [ARGUMENTS...]
#
#   NUM_HOSTS    hosts (default 1)
#   MASTER_ADDR  with several: the host where torchrun's store is (the first one), the same on all
#   MASTER_PORT  its port (default 29400)
#   JOB          a name that no other job has there (default: polyreme)
#   POLYREME_SECRET_FILE  with several: a file of mode 0600 with a secret, on every host
set -euo pipefail
ranks="$1"
shift

if [ "${NUM_HOSTS:-1}" = 1 ]; then
  exec torchrun --standalone --nproc-per-node "$ranks" "$@"
fi
exec torchrun --nnodes "$NUM_HOSTS" --nproc-per-node "$ranks" --rdzv-id "${JOB:-polyreme}" \
  --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" "$@"
