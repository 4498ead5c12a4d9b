"""A Slurm of one machine in a folder of its own: munge, the controller, and two virtual nodes."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time

from helpers import HANG_S, clean_environment, processes_with

PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
NODES = ("n1", "n2")

CONFIG = """
ClusterName=polyreme
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


def free_ports(count):
    with contextlib.ExitStack() as open_sockets:
        probes = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    """Its daemons run from `start` to `stop`, in the foreground of processes of ours."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        self.environment = clean_environment(
            SLURM_CONF=f"{folder}/slurm.conf", POLYREME_TEST_JOB=str(folder), PATH=PATH
        )

    def start(self):
        folder = self.folder
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        config = CONFIG.format(folder=folder, user=getpass.getuser(), ports=free_ports(3))
        (folder / "slurm.conf").write_text(config)
        files = {name: f"{folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon(
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"),
            *(f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"),
        )
        self._wait(lambda: os.path.exists(files["socket"]))
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(lambda: self._run("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n")
        return self

    def stop(self):
        """Ends every daemon that was started, the last one first, and waits for what they have started."""
        for process in reversed(self.daemons):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + HANG_S
        while left := processes_with("POLYREME_TEST_JOB", self.folder):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def srun(self, *arguments, **environment):
        """srun, whose job may not outlive it."""
        return self._run("srun", "--immediate=30", *map(str, arguments), **environment)

    def sbatch(self, *arguments, **environment):
        """A batch job to its end: (whether it succeeded, what it printed)."""
        output = self.folder / "batch.out"
        command = ("sbatch", "--parsable", f"--output={output}", *map(str, arguments))
        submitted = self._run(*command, **environment)
        assert submitted.returncode == 0, submitted.stderr

        def state():
            shown = self._run("scontrol", "--oneliner", "show", "job", submitted.stdout.strip()).stdout
            return dict(pair.partition("=")[::2] for pair in shown.split()).get("JobState")

        self._wait(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
        return state() == "COMPLETED", output.read_text()

    def has_mpi(self, kind):
        # The list goes to stderr, or to stdout in later versions.
        done = self._run("srun", "--mpi=list")
        return kind in (done.stdout + done.stderr).split()

    def _run(self, *command, **environment):
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def _daemon(self, name, *arguments):
        with open(self.folder / f"{name}.{len(self.daemons)}.log", "w") as log:
            process = subprocess.Popen(
                [shutil.which(name, path=PATH), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.daemons.append(process)

    def _wait(self, is_ready):
        deadline = time.monotonic() + HANG_S
        while not is_ready():
            ended = [process.args[0] for process in self.daemons if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"ended: {ended}\n{self._logs()}"  # noqa: PT018
            time.sleep(0.05)

    def _logs(self):
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
