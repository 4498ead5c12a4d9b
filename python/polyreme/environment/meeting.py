"""How the ranks of a job find rank 0: a named port, torchrun's own store, or a private file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import CommError, InvalidArgument
from . import agent_store, private_file
from .variables import RankEnvironment

_MAX_SECRET_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where rank 0 listens, and what admits to the job.

    store_fd: on rank 0, the socket that listens there already, or None if it has yet to be bound.
        Whoever opens the store takes it over.
    is_held: somebody has listened there from the start.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    job_id: str
    store_fd: int | None = None
    is_held: bool = False


@contextlib.contextmanager
def meet(env: RankEnvironment, limit_s: float) -> Iterator[Meeting]:
    """What a rank needs to join the store of rank 0. The body joins it.

    The port is the first of: what the launcher or the user has named, or a number derived from
    Slurm's job; under torchrun, a free one that rank 0 tells through the agent's store if PyTorch is
    there, else the one next to MASTER_PORT; under mpirun and srun on one host, a free one that rank 0
    tells in a private file. What was told is taken back after the body, when all have read it.

    The secret is POLYREME_SECRET; else the content of the private file POLYREME_SECRET_FILE; else,
    where a private file tells the port, random and told with it; else the job's name, which guards
    against mixing up jobs, not against an attacker.

    Raises:
        Timeout: rank 0 has not told its port within limit_s.
        CommError, InvalidArgument, NotAvailable: no way to meet; the message says what was tried.
    """
    job_id = env.job_id or private_file.launcher_identity(env.rank_variables)
    secret = env.secret or _read_secret(env.secret_file)
    if env.agent_port and importlib.util.find_spec("torch") is not None:
        through = _at_agent(env, job_id, secret, limit_s)
    elif env.agent_port or env.master_port or env.size == 1:
        through = _at_port(env, job_id, secret)
    else:
        through = _at_file(env, job_id, secret, limit_s)
    with through as meeting:
        yield meeting


@contextlib.contextmanager
def _at_port(env: RankEnvironment, job_id: str, secret: str) -> Iterator[Meeting]:
    try:
        yield Meeting(
            host=env.master_addr,
            port=env.master_port,
            secret=secret or job_id,
            job_id=job_id,
            store_fd=env.store_fd,
            is_held=env.port_is_held,
        )
    except CommError as error:
        if not env.origin:
            raise
        tried = env.origin
        if env.agent_port:  # ranks that have it look elsewhere
            tried += "; PyTorch, which could ask the store there, is not installed: it must be on all hosts or none"
        raise type(error)(f"{error} ({tried})") from None


@contextlib.contextmanager
def _at_agent(env: RankEnvironment, job_id: str, secret: str, limit_s: float) -> Iterator[Meeting]:
    store = agent_store.AgentStore(env.master_addr, env.agent_port, f"polyreme/{job_id}", limit_s)
    if env.rank != 0:
        host, port = store.ask()
        yield Meeting(host=host, port=port, secret=secret or job_id, job_id=job_id, is_held=True)
        return
    with listen(env.master_addr) as listener:
        host, port = listener.getsockname()[:2]
        with store.told(host, port), _given_away(listener) as fd:
            yield Meeting(
                host=host, port=port, secret=secret or job_id, job_id=job_id, store_fd=fd, is_held=True
            )


@contextlib.contextmanager
def _at_file(env: RankEnvironment, job_id: str, secret: str, limit_s: float) -> Iterator[Meeting]:
    if env.rank != 0:
        told = private_file.wait_for(job_id, limit_s)
        yield Meeting(
            host=told.host, port=told.port, secret=secret or told.secret, job_id=job_id, is_held=True
        )
        return
    told_secret = "" if secret else secrets.token_hex(32)
    with listen(env.master_addr) as listener:
        host, port = listener.getsockname()[:2]
        told = private_file.Told(host=host, port=port, secret=told_secret)
        with private_file.told(job_id, told), _given_away(listener) as fd:
            yield Meeting(
                host=host, port=port, secret=secret or told_secret, job_id=job_id, store_fd=fd, is_held=True
            )


@contextlib.contextmanager
def _given_away(listener: socket.socket) -> Iterator[int]:
    """Its descriptor, for whoever opens the store; closed if the body fails before that."""
    socket_id = os.fstat(listener.fileno()).st_ino
    fd = listener.detach()
    try:
        yield fd
    except BaseException:
        # One that was taken over is closed by now, and its number may be somebody else's.
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == socket_id:
                os.close(fd)
        raise


def listen(host: str) -> socket.socket:
    """A socket that listens at a free port of this address, and there only.

    Raises:
        CommError: the address is none of this host.
    """
    tried = []
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommError(f"rank 0: MASTER_ADDR={host!r} has no address: {error.strerror}") from None
    for family, kind, protocol, _, address in addresses:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            listener.close()
            tried.append(f"{address[0]}: {error.strerror}")
    raise CommError(
        f"rank 0 cannot listen at MASTER_ADDR={host!r} ({'; '.join(tried)}); it must be an address of the"
        " host of rank 0"
    )


def _read_secret(path: str) -> str:
    if not path:
        return ""
    name = f"POLYREME_SECRET_FILE={path!r}"
    try:
        # A pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        if problem := private_file.why_not_private(os.fstat(fd)):
            raise InvalidArgument(f"{name} {problem}; expected a file of this user with mode 0600")
        content = file.read(_MAX_SECRET_BYTES + 1)
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        secret = ""
    if not secret or len(content) > _MAX_SECRET_BYTES:
        raise InvalidArgument(f"{name} must hold 1 to {_MAX_SECRET_BYTES} characters of ASCII")
    return secret
