"""Two hosts on one machine: namespaces of their own for network, names and mounts, joined by a cable.

Ranks on them share neither an address nor /dev/shm. Needs root and util-linux's unshare; the addresses are
of the range for documentation (RFC 5737) and exist inside the namespaces alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers import clean_environment

ADDRESSES = ("192.0.2.1", "192.0.2.2")
PORT = 29400


def why_not() -> str:
    """Why this machine cannot play two hosts; empty if it can."""
    try:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "--uts",
                "--net",
                "sh",
                "-c",
                "ip link add name cable type veth peer name other",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class TwoHosts:
    """Context manager. `run` starts ranks, host by host; `cable` and `ip` change the network between them."""

    def __enter__(self) -> TwoHosts:
        self._keepers = []
        self._ranks: list[subprocess.Popen[str]] = []
        try:
            for name in ("left", "right"):
                setup = f"hostname {name} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up"
                keeper = subprocess.Popen(
                    [
                        "unshare",
                        "--mount",
                        "--uts",
                        "--net",
                        "sh",
                        "-c",
                        f"{setup} && echo ready && exec cat",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._keepers.append(keeper)
                assert keeper.stdout is not None
                assert keeper.stdout.readline() == "ready\n", f"{name}: the namespaces could not be made"
            right = self._keepers[1].pid
            self.on(
                0,
                "ip",
                "link",
                "add",
                "name",
                "cable",
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                str(right),
            )
            for host, address in enumerate(ADDRESSES):
                self.on(host, "ip", "address", "add", f"{address}/24", "dev", "cable")
                self.on(host, "ip", "link", "set", "cable", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._ranks, *self._keepers]:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", "--target", str(self._keepers[host].pid), "--mount", "--uts", "--net"]

    def on(self, host: int, *command: str) -> None:
        """Runs a command on a host."""
        subprocess.run([*self._enter(host), *command], check=True, capture_output=True)

    def cable(self, up: bool) -> None:
        """Plugs the cable in, or out: what is sent then is lost without a word."""
        self.on(1, "ip", "link", "set", "cable", "up" if up else "down")

    def start(self, script: Path, ranks_of: tuple[int, int] = (2, 2), **environment: str) -> None:
        """Starts `script` as ranks_of[host] ranks on each host."""
        rank = 0
        for host, count in enumerate(ranks_of):
            for local_rank in range(count):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(ranks_of)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": str(PORT),
                    **environment,
                }
                self.launch(host, [sys.executable, "-u", str(script)], **variables)
                rank += 1

    def launch(self, host: int, command: list[str], **environment: str) -> None:
        """Starts a command on a host."""
        self._ranks.append(
            subprocess.Popen(
                [*self._enter(host), *command],
                env=clean_environment(**{"POLYREME_SECRET": "two hosts", **environment}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def wait_for(self, paths: list[Path], limit_s: float = 60.0) -> None:
        """Waits until the ranks have made these files."""
        deadline = time.monotonic() + limit_s
        while not all(path.exists() for path in paths):
            ended = [r for r, process in enumerate(self._ranks) if process.poll() is not None]
            assert not ended, f"rank {ended[0]} ended early:\n{self._ranks[ended[0]].communicate()[1]}"
            assert time.monotonic() < deadline, "the ranks did not come so far"
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        """SIGKILL for a rank: nsenter has become the script."""
        os.kill(self._ranks[rank].pid, signal.SIGKILL)

    def ends(self, limit_s: float = 60.0) -> list[tuple[int, str, str]]:
        """Waits for all ranks: exit code, stdout and stderr of each."""
        deadline = time.monotonic() + limit_s
        return [
            (process.returncode if out is not None else 0, out, err)
            for process in self._ranks
            for out, err in [process.communicate(timeout=max(0.1, deadline - time.monotonic()))]
        ]
