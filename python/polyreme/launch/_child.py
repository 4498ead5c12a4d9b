"""Becomes one rank: ties its life to the launcher, binds it to its CPUs, runs its command.

Started as a file by a bare interpreter (`python -I -S`), so that it costs milliseconds and
imports nothing of the package. Arguments: the launcher's pid, CPUs as `0,1,2` or `-`, command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.stderr.write("polyreme run: no parent-death signal here; kill ranks by hand if needed\n")
    if os.getppid() != launcher:  # it died before the line above: the signal will not come
        os._exit(128 + signal.SIGKILL)
    if cpus != "-":
        try:
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
        except OSError as error:
            sys.stderr.write(f"polyreme run: cannot bind to CPUs {cpus}: {error}; going on unbound\n")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
