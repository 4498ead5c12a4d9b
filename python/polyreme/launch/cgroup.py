"""Reads the limits and out-of-memory counts of this process's control group (v2 and v1).

Every function answers None when the system does not tell; none raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _number_after(text: str, key: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _group_folders(controller: str, root: str = "/") -> Iterator[tuple[int, str]]:
    """(version, folder) of the own control group and then of its ancestors, both versions."""
    text = _read(os.path.join(root, "proc/self/cgroup")) or ""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, mount = 2, os.path.join(root, "sys/fs/cgroup")
        elif controller in controllers.split(","):
            version, mount = 1, os.path.join(root, "sys/fs/cgroup", controller)
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        # Inside a container the path may be the host's; the mount point itself always exists.
        for depth in range(len(parts), -1, -1):
            yield version, os.path.join(mount, *parts[:depth])


def oom_kills(root: str = "/") -> int | None:
    """Processes of this group that the out-of-memory killer has ended so far."""
    for version, folder in _group_folders("memory", root):
        name = "memory.events" if version == 2 else "memory.oom_control"
        text = _read(os.path.join(folder, name))
        count = None if text is None else _number_after(text, "oom_kill")
        if count is not None:
            return count
    return _number_after(_read(os.path.join(root, "proc/vmstat")) or "", "oom_kill")


def memory_limit_bytes(root: str = "/") -> int | None:
    """The tightest memory limit of this group and its ancestors."""
    limits = []
    for version, folder in _group_folders("memory", root):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        text = (_read(os.path.join(folder, name)) or "").strip()
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes "no limit" as a huge number
            limits.append(int(text))
    return min(limits) if limits else None


def cpu_quota(root: str = "/") -> float | None:
    """CPUs' worth of time that this group and its ancestors may use."""
    quotas = []
    for version, folder in _group_folders("cpu", root):
        if version == 2:
            words = (_read(os.path.join(folder, "cpu.max")) or "").split()
        else:
            words = [
                (_read(os.path.join(folder, name)) or "").strip()
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas) if quotas else None
