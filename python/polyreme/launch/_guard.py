"""Outlives a killed launcher for a moment, to end what it left: loader workers, shared memory.

The parent-death signal ends the ranks themselves, but not the processes that they forked.
Started as a file by a bare interpreter. Argument: the prefix of the job's segments. Standard
input: one process group per line, with a minus when it has ended, then `done` before an orderly
end; end of file means that the launcher is gone.
"""

import contextlib
import os
import shutil
import signal
import sys
import time


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if line.startswith("-"):
            groups.remove(int(line[1:]))
        else:
            groups.append(int(line))
    for _ in range(3):  # again, for a process that was forked while the first round went on
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.05)
    for name in os.listdir("/dev/shm"):
        if name.startswith(sys.argv[1]):
            path = os.path.join("/dev/shm", name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)


if __name__ == "__main__":
    main()
