"""The port, taken before anything is loaded; without the rest of the server, whose import takes longer."""

from __future__ import annotations

import errno
import socket

from cllm.config import ServerConfig
from cllm.errors import PortInUse


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything is loaded. Raises PortInUse."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit it. The kernel takes megabytes before we notice that nobody reads; it knows.
        limit_ms = int(1000 * config.slow_reader_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
    try:
        listener.bind((config.host, config.port))
        # Two listeners may bind the same port with SO_REUSEADDR until one of them listens.
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {config.port} on {config.host} is in use: stop what listens there or choose --port"
            ) from None
        raise PortInUse(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None
    return listener
