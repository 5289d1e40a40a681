"""A channel whose calls all carry the same metadata, such as credentials.

grpc.aio's interceptors would do, too, but wrap calls in others that behave differently where they
are cancelled or end early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc
import grpc.aio

Metadata = Sequence[tuple[str, str | bytes]]


class MetadataChannel(grpc.aio.Channel):
    """Stands before another channel, and adds `metadata` to what callers give."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def _carry(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def with_metadata(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return with_metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio.Channel's."""
        return self._carry(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio.Channel's."""
        return self._carry(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio.Channel's."""
        return self._carry(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio.Channel's."""
        return self._carry(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """As grpc.aio.Channel's."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As grpc.aio.Channel's."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As grpc.aio.Channel's."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As grpc.aio.Channel's."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()
