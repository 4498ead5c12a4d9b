#!/usr/bin/env bash
# Ranks by mpirun or mpiexec of Open MPI, MPICH or Intel MPI:
#
#   scripts/launch/mpirun.sh NUM_RANKS SCRIPT [ARGUMENTS...]
#
#   MPIRUN       the command with further options (default mpirun)
#   HOSTS        a:8,b:8 for 8 ranks on each of two hosts (default: this host)
#   MASTER_ADDR, MASTER_PORT  with several hosts: where rank 0, on the first of them, shall listen
#   POLYREME_SECRET_FILE      with several hosts: a file of mode 0600 with a secret, on every host
#   PYTHON       the interpreter (default python3)
set -euo pipefail
ranks="$1"
shift

read -ra command <<<"${MPIRUN:-mpirun}"
if "${command[0]}" --version 2>&1 | grep -qE 'Open MPI|OpenRTE'; then
  # Bound to one core each, ranks would have one thread.
  command+=(--bind-to none ${HOSTS:+--host "$HOSTS"})
  for name in MASTER_ADDR MASTER_PORT POLYREME_SECRET POLYREME_SECRET_FILE POLYREME_NUM_THREADS POLYREME_RECORD_DIR; do
    [ -z "${!name:-}" ] || command+=(-x "$name")
  done
else # Hydra hands on the whole environment
  command+=(${HOSTS:+-hosts "$HOSTS"})
fi
exec "${command[@]}" -n "$ranks" "${PYTHON:-python3}" "$@"
