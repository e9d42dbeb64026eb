"""Work that may hang or blow up, in a process that may be killed for it.

    this process ──call──▶ child          answers, or goes over its limits and is killed
          ▲                  ▲ fork
          └──── "died" ──── nursery       waits for the child, makes another one

The nursery is forked once, before this process has threads or sockets, so that every child begins
from the same clean memory with everything imported. A child has a limit of processor time for each
call (`RLIMIT_CPU`) and of memory (`RLIMIT_AS`), and gives way to all others (`nice`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Never

import psutil

Handler = Callable[[bytes], bytes]

NICE = 10
WALL_FACTOR = 6
"""Processor seconds that a call may take, times this, are the seconds that are waited for it."""

_HEADER = struct.Struct("<cI")
_CALL, _ANSWER, _STARTED, _DIED = b"c", b"a", b"s", b"d"


class OverLimit(Exception):
    """The call went over its time or memory, or ended its process in another way."""


class Sandbox:
    """Runs `handler` elsewhere, one call at a time. Thread-safe.

    `cpu_seconds` is whole seconds for each call, `memory_bytes` what a child may add to the address
    space it begins with, `wait_seconds` how long a call is waited for, whatever it does (None: some
    times `cpu_seconds`). To be made before the process has other threads.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        cpu_seconds: int,
        memory_bytes: int,
        wait_seconds: float | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._wait_s = wait_seconds or float(cpu_seconds * WALL_FACTOR)
        self._child = 0
        self._socket, theirs = socket.socketpair()
        self._nursery = os.fork()
        if self._nursery == 0:
            self._socket.close()
            _tend(theirs, handler, cpu_seconds, memory_bytes)
        theirs.close()

    def call(self, request: bytes) -> bytes:
        """`handler(request)`.

        Raises:
            OverLimit: see there; the next call gets a new child.
        """
        with self._lock:
            deadline = time.monotonic() + self._wait_s
            try:
                _send(self._socket, _CALL, request)
                while True:
                    self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                    kind, data = _receive(self._socket)
                    if kind == _ANSWER:
                        return data
                    if kind == _DIED:
                        self._child = 0
                        raise OverLimit
                    self._child = int.from_bytes(data, "little")
            except TimeoutError:
                self._kill()
                raise OverLimit from None
            except OSError as error:
                raise OverLimit("the sandbox is gone") from error

    def _kill(self) -> None:
        """End the child, and read up to the news of its death, which is not the next call's."""
        self._socket.settimeout(None)
        self._end_child()
        while True:
            kind, data = _receive(self._socket)
            if kind == _DIED:
                self._child = 0
                return
            if kind == _STARTED:  # it had not even come so far
                self._child = int.from_bytes(data, "little")
                self._end_child()

    def _end_child(self) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def close(self) -> None:
        """End nursery and child. A call that runs raises `OverLimit`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end_child()
        os.waitpid(self._nursery, 0)
        self._socket.close()


def limit_resource(which: int, soft: int) -> None:
    """Set this process's soft limit, as far as its hard limit allows."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(which, (soft, hard))


def _send(peer: socket.socket, kind: bytes, data: bytes) -> None:
    peer.sendall(_HEADER.pack(kind, len(data)) + data)


def _receive(peer: socket.socket) -> tuple[bytes, bytes]:
    kind, size = _HEADER.unpack(_read(peer, _HEADER.size))
    return kind, _read(peer, size)


def _read(peer: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = peer.recv(min(1 << 20, size - len(parts)))
        if not part:
            raise ConnectionResetError("the other end is closed")
        parts += part
    return bytes(parts)


def _tend(peer: socket.socket, handler: Handler, cpu_seconds: int, memory_bytes: int) -> Never:
    """The nursery: keep one child alive until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides
    os.nice(NICE)
    try:
        while True:
            child = os.fork()
            if child == 0:
                _work(peer, handler, cpu_seconds, memory_bytes)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                break
            _send(peer, _DIED, b"")
    except OSError:
        os._exit(0)
    os._exit(0)


def _work(peer: socket.socket, handler: Handler, cpu_seconds: int, memory_bytes: int) -> Never:
    """The child: answer calls until the other end is closed, or a limit kills it."""
    try:
        limit_resource(resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory_bytes)
        limit_resource(resource.RLIMIT_CORE, 0)
        _send(peer, _STARTED, os.getpid().to_bytes(4, "little"))
        while True:
            _, request = _receive(peer)
            spent = time.process_time()
            limit_resource(resource.RLIMIT_CPU, int(spent) + 1 + cpu_seconds)
            answer = handler(request)
            # Half an answer could not be told from the next one.
            limit_resource(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
            _send(peer, _ANSWER, answer)
    except ConnectionResetError:
        os._exit(0)
    except BaseException:  # also MemoryError: the nursery tells
        os._exit(1)
