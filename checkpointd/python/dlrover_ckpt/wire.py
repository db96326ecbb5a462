"""The connection to the checkpoint daemon: one line of JSON for a request, one for its reply."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Dict, Optional

_MAX_LINE = 1 << 20


class Refused(Exception):
    """The daemon's answer was no; the text says why."""


class Daemon:
    """What the daemon of this node is asked. It may be absent, or die and come back, at any time.

    notify() keeps one connection and never waits, not even for the answer to hello: a daemon that is being started
    hears of everything later. call() makes its own.
    """

    def __init__(self, path: str, hello: Dict[str, Any]) -> None:
        self._path = path
        self._hello = dict(hello, op="hello", v=1)
        self._conn: Optional[socket.socket] = None
        self._pid = os.getpid()
        self._replies = b""

    def present(self) -> bool:
        """Whether somebody listens."""
        return self._notifier() is not None

    def notify(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Sends a request. Returns the newest reply to an earlier one, or {}; one that says no has "note" for why.
        Without a daemon nothing happens."""
        for _ in range(2):  # the second time with a new connection, when the daemon was started again
            conn = self._notifier()
            if conn is None:
                return {}
            reply = self._drain(conn)
            if reply is None:
                continue
            try:
                # A request is far smaller than the socket's buffer; a full one means a daemon that has stopped.
                line = _encode(request)
                if conn.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(line):
                    self.close()
            except BlockingIOError:
                return reply
            except OSError:
                self.close()
                continue
            return reply
        return {}

    def call(self, request: Dict[str, Any], timeout: float) -> Dict[str, Any]:
        """One request and its reply. OSError: there is no daemon, or it does not answer. Refused: it says no."""
        with self._connect(5.0) as conn:
            conn.settimeout(timeout)
            conn.sendall(_encode(request))
            reply = _read(conn)
        if not reply.get("ok"):
            raise Refused(str(reply.get("error", "no reason given")))
        return reply

    def close(self) -> None:
        if self._conn is not None and self._pid == os.getpid():
            self._conn.close()
        self._conn = None

    def _notifier(self) -> Optional[socket.socket]:
        if self._pid != os.getpid():  # a fork: the connection is the parent's
            self._conn, self._pid = None, os.getpid()
        if self._conn is None:
            try:
                self._conn = self._dial(0.0)  # with a timeout, even MSG_DONTWAIT waits for data first
            except OSError:
                return None
            self._replies = b""
        return self._conn

    def _dial(self, timeout: float) -> socket.socket:
        """A connection on which hello was said."""
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            conn.settimeout(timeout)
            conn.connect(self._path)
            conn.sendall(_encode(self._hello))
        except BaseException:
            conn.close()
            raise
        return conn

    def _connect(self, timeout: float) -> socket.socket:
        conn = self._dial(timeout)
        try:
            reply = _read(conn)
            if not reply.get("ok"):
                raise Refused(str(reply.get("error", "no reason given")))
        except BaseException:
            conn.close()
            raise
        return conn

    def _drain(self, conn: socket.socket) -> Optional[Dict[str, Any]]:
        """The newest reply that has arrived, or the last that says no; None: the connection is gone."""
        newest: Dict[str, Any] = {}
        refused: Dict[str, Any] = {}
        while True:
            try:
                got = conn.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            if not got:
                self.close()
                return None
            self._replies = (self._replies + got)[-_MAX_LINE:]
        lines = self._replies.split(b"\n")
        self._replies = lines.pop()
        for line in lines:
            try:
                reply = json.loads(line)
            except ValueError:
                continue
            if isinstance(reply, dict) and reply.get("ok"):
                newest = reply
            elif isinstance(reply, dict):
                refused = {"note": str(reply.get("error", "no reason given"))}
        return refused or newest


def _encode(request: Dict[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _read(conn: socket.socket) -> Dict[str, Any]:
    buf = b""
    while not buf.endswith(b"\n"):
        got = conn.recv(65536)
        if not got or len(buf) > _MAX_LINE:
            raise ConnectionError("the checkpoint daemon ended the connection")
        buf += got
    reply = json.loads(buf.decode())
    if not isinstance(reply, dict):
        raise ValueError("the checkpoint daemon sent %.80r" % reply)
    return reply
