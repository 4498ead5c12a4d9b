"""Open MPI as a contender of `bench comm`: a job of its own, which sleeps while the others have their turn."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from ..errors import Error, NotAvailable

__all__ = ["MpiJob", "find_open_mpi"]

_MISSING = "--against mpi: {} was not found; install libopenmpi-dev, openmpi-bin and a C compiler"


def find_open_mpi() -> tuple[str, str]:
    """The paths of (mpicc, mpirun) of Open MPI. Raises NotAvailable."""
    for suffix in (".openmpi", ""):
        mpicc, mpirun = shutil.which("mpicc" + suffix), shutil.which("mpirun" + suffix)
        if mpicc and mpirun:
            version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
            if "Open MPI" in version.stdout:
                return mpicc, mpirun
    raise NotAvailable(_MISSING.format("Open MPI"))


class MpiJob:
    """`ranks` processes under mpirun, and the pipes to them. A context manager."""

    def __init__(self, ranks: int) -> None:
        mpicc, mpirun = find_open_mpi()
        self._folder = tempfile.TemporaryDirectory(prefix="polyreme-mpi-")
        folder = Path(self._folder.name)
        source, program = Path(__file__).with_name("mpi_loops.c"), folder / "mpi_loops"
        built = subprocess.run(
            [mpicc, "-O3", "-o", str(program), str(source)], capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            raise NotAvailable(f"--against mpi: mpicc failed: {built.stderr.strip()}")
        pipes = [folder / f"rank{rank}" for rank in range(ranks)]
        for pipe in pipes:
            os.mkfifo(pipe, 0o600)
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        options = ["--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "vader,self"]
        self._process = subprocess.Popen(
            [mpirun, "-n", str(ranks), *options, str(program), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._commands = [self._open(pipe) for pipe in pipes]

    def _open(self, pipe: Path) -> int:
        """Opens a pipe to a rank once the rank reads it; gives up when the job has ended."""
        while self._process.poll() is None:
            try:
                fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                time.sleep(0.05)
            else:
                os.set_blocking(fd, True)
                return fd
        raise Error(f"bench comm: mpirun ended with exit code {self._process.returncode}")

    def time(self, op: str, count: int, iterations: int) -> float:
        """Seconds of one operation, the mean of `iterations` in a row, on the slowest rank."""
        for fd in self._commands:
            os.write(fd, f"{op} {count} {iterations}\n".encode())
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Error("bench comm: the MPI job has ended early; its error is above")
        return float(line)

    def __enter__(self) -> MpiJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._commands:
            os.close(fd)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()
