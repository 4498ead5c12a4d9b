#!/usr/bin/env bash
# From a bare Debian 12 to a GPT that trains on two local ranks:
#
#   scripts/quickstart.sh [arguments of examples/01_train_gpt.py]
#
# POLYREME_RANKS (default 2) sets the number of ranks.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

"$ROOT/scripts/setup.sh"
cd "$ROOT"
exec "$VENV/bin/polyreme" run -n "${POLYREME_RANKS:-2}" examples/01_train_gpt.py "$@"
