"""Removes a memory segment when the process that it belongs to has ended: see memory_segment.py.

Started as a file by a bare interpreter. Arguments: the process, the segment.
"""

import os
import select
import shutil
import signal
import sys
import time


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner, path = int(sys.argv[1]), sys.argv[2]
    try:
        process = os.pidfd_open(owner)
        select.select([process], [], [])
    except OSError:  # it has ended already, or this system has no such call
        while os.path.exists(f"/proc/{owner}"):
            time.sleep(1.0)
    for _ in range(3):  # again, for a rank that has not ended yet
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
