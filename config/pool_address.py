"""The address of a pool of KV that several workers share."""

import re
from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import parse_qsl, urlsplit

FORM: Final = (
    "mooncake://host:port/namespace?protocol=tcp|rdma&devices=a,b, the last two optional, or "
    "lmcache://host:port/namespace"
)
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """Where the master of Mooncake Store is, how its clients move bytes, and a part of all keys.
    Or where LMCache's server is."""

    host: str
    port: int
    namespace: str = ""
    kind: Literal["mooncake", "lmcache"] = "mooncake"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""  # names of RDMA devices with commas between; empty for all

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError with the accepted form."""
        try:
            parts = urlsplit(url)
            host, port, namespace = parts.hostname, parts.port, parts.path.removeprefix("/")
            given = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        except ValueError as error:
            raise ValueError(f"expected {FORM}, got {url!r}") from error
        protocol, devices = given.pop("protocol", "tcp"), given.pop("devices", "")
        kind = parts.scheme
        is_known = kind == "mooncake" or (kind == "lmcache" and not parts.query)
        has_rest = given or parts.fragment or "@" in parts.netloc
        is_valid = protocol in ("tcp", "rdma") and _NAMESPACE.fullmatch(namespace)
        if not (is_known and host and port and is_valid) or has_rest:
            raise ValueError(f"expected {FORM}, got {url!r}")
        return cls(
            host=host,
            port=port,
            namespace=namespace,
            kind=kind,  # type: ignore[arg-type]
            protocol=protocol,  # type: ignore[arg-type]
            devices=devices,
        )
