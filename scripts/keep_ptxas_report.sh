#!/bin/sh
# keep_ptxas_report.sh COMPILER ARGUMENTS...: runs the compiler and keeps what ptxas says of registers, shared memory and
# spills in OBJECT.ptxas (scripts/kernel_resources.py reads it). Everything else it says is passed on.
object=""
previous=""
for argument in "$@"; do
  [ "$previous" = -o ] && object="$argument"
  previous="$argument"
done
said="$object.said"
"$@" 2>"$said"
status=$?
grep -E '^ptxas info|bytes stack frame' "$said" >"$object.ptxas"
grep -vE '^ptxas info|bytes stack frame' "$said" >&2
rm -f "$said"
exit $status
