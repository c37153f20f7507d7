"""Media fetcher: pictures at addresses of hosts that the operator named, never inside the network here."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from ipaddress import IPv6Address, IPv6Network, ip_address

import httpx

from cllm import __version__
from cllm.errors import InvalidRequest
from cllm.limits import MAX_FETCH_S, MAX_PICTURE_BYTES, MAX_REDIRECTS

HEADERS = {"User-Agent": f"cllm/{__version__}", "Accept-Encoding": "identity"}
PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. One that carries an IPv4 address is not."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and (
        found.ipv4_mapped or found.sixtofour or found.teredo or found in _NAT64
    ):
        return False
    return found.is_global and not found.is_multicast


def resolve(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class MediaFetcher:
    """Fetches files of named hosts. Safe from several threads."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """A host is a name, or `*.name` for all names below it; another port than the usual follows it."""
        self._hosts = [host.lower() for host in hosts]

    def __call__(self, url: str, number: int, deadline: float) -> bytes:
        """The file at an address. Raises InvalidRequest, which names the picture and its host."""
        try:
            # A proxy would resolve the name once more.
            with httpx.Client(trust_env=False, headers=HEADERS) as client:
                return b"".join(self._read(client, httpx.URL(url), deadline))
        except InvalidRequest as error:
            reason = error.message
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = type(error).__name__
        raise InvalidRequest(f"picture {number} cannot be fetched: {reason}", "messages")

    def _read(self, client: httpx.Client, url: httpx.URL, deadline: float) -> Iterator[bytes]:
        size = 0
        for _ in range(MAX_REDIRECTS + 1):
            with closing(self._send(client, url, deadline)) as response:
                if response.is_redirect:
                    url = url.join(response.headers["location"])
                    continue
                if response.status_code != 200:
                    raise InvalidRequest(f"{url.host} answers {response.status_code}")
                for piece in response.iter_raw():
                    size += len(piece)
                    if time.monotonic() > deadline or size > MAX_PICTURE_BYTES:
                        limits = f"{MAX_FETCH_S} s, or has over {MAX_PICTURE_BYTES} bytes"
                        raise InvalidRequest(f"it takes longer than {limits}")
                    yield piece
                return
        raise InvalidRequest(f"more than {MAX_REDIRECTS} redirects")

    def _send(self, client: httpx.Client, url: httpx.URL, deadline: float) -> httpx.Response:
        """Ask the address that was checked, by its number: the name may be another's a moment later."""
        place = url.netloc.decode().lower()
        if url.scheme not in PORTS or url.userinfo:
            raise InvalidRequest("its address must be http://HOST/… or https://HOST/…")
        if not any(place == each or (each[0] == "*" and place.endswith(each[1:])) for each in self._hosts):
            raise InvalidRequest(f"{place} is not among --media-hosts")
        found = resolve(url.host, url.port or PORTS[url.scheme])
        if not found or not all(map(is_public, found)):
            raise InvalidRequest(f"{place} has no public address")
        left, sni = max(0.1, deadline - time.monotonic()), {"sni_hostname": url.host}
        numbered = url.copy_with(host=found[0])
        request = client.build_request("GET", numbered, headers={"Host": place}, extensions=sni, timeout=left)
        return client.send(request, stream=True)
