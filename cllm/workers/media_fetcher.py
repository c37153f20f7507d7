"""Media fetcher: pictures at addresses of hosts that the operator named, never inside the network here."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

from cllm import __version__
from cllm.errors import InvalidRequest
from cllm.limits import MAX_FETCH_S, MAX_PICTURE_BYTES, MAX_REDIRECTS

PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. One that carries an IPv4 address is not."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and (
        found.ipv4_mapped or found.sixtofour or found.teredo or found in _NAT64
    ):
        return False
    return found.is_global and not found.is_multicast


def resolve(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class MediaFetcher:
    """Fetches files of named hosts. Safe from several threads."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Callable[[str, int], list[str]] = resolve,
        is_public: Callable[[str], bool] = is_public,
        limit_s: float = MAX_FETCH_S,
    ) -> None:
        """A host is a name, or `*.name` for all names below it; without a port it is the usual one."""
        self._hosts = [host.lower() for host in hosts]
        self._resolve, self._is_public, self._limit_s = resolve, is_public, limit_s

    def __call__(self, url: str, number: int) -> bytes:
        """The file at an address. Raises InvalidRequest, which names the picture and its host."""
        try:
            return b"".join(self._read(url, time.monotonic() + self._limit_s))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            reason = type(error).__name__
        except ValueError as error:
            reason = str(error)
        raise InvalidRequest(f"picture {number} cannot be fetched: {reason}", "messages")

    def _read(self, given: str, deadline: float) -> Iterator[bytes]:
        url, size = httpx.URL(given), 0
        # A proxy would resolve the name once more, and a client of its own keeps no cookies of others.
        with httpx.Client(trust_env=False, follow_redirects=False) as client:
            for _ in range(MAX_REDIRECTS + 1):
                with closing(self._send(client, url, deadline)) as response:
                    if response.is_redirect:
                        url, before = url.join(response.headers["location"]), url
                        if (before.scheme, url.scheme) == ("https", "http"):
                            raise ValueError(f"{before.host} redirects to plain http")
                        continue
                    if response.status_code != 200:
                        raise ValueError(f"{url.host} answers {response.status_code}")
                    for piece in response.iter_raw():
                        if time.monotonic() > deadline:
                            raise ValueError(f"{url.host} takes longer than {self._limit_s:g} s")
                        if (size := size + len(piece)) > MAX_PICTURE_BYTES:
                            raise ValueError(f"it has more than {MAX_PICTURE_BYTES} bytes")
                        yield piece
                    return
            raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    def _send(self, client: httpx.Client, url: httpx.URL, deadline: float) -> httpx.Response:
        """Ask the address that was checked, by its number: the name may be another's a moment later."""
        port = url.port or PORTS.get(url.scheme, 0)
        if not (port and url.host) or url.userinfo:
            raise ValueError("its address must be http://HOST/… or https://HOST/…")
        if not self._is_named(url.host.lower(), port, usual=port == PORTS[url.scheme]):
            raise ValueError(f"{url.host} is not among --media-hosts")
        found = self._resolve(url.host, port)
        if not found or not all(map(self._is_public, found)):
            raise ValueError(f"{url.host} has no public address")
        left = max(0.1, deadline - time.monotonic())
        request = client.build_request(
            "GET",
            url.copy_with(host=found[0]),
            headers={
                "Host": url.netloc.decode(),
                "User-Agent": f"cllm/{__version__}",
                "Accept-Encoding": "identity",
            },
            extensions={"sni_hostname": url.host},
            timeout=left,
        )
        return client.send(request, stream=True)

    def _is_named(self, host: str, port: int, *, usual: bool) -> bool:
        for named in self._hosts:
            name, _, own_port = named.partition(":")
            fits = host == name or (name.startswith("*.") and host.endswith(name[1:]))
            if fits and (port == int(own_port) if own_port else usual):
                return True
        return False
