"""Bodies of OpenAI's HTTP API, read without a halt of the event loop.

A body of a few MB may be a million lists, and then takes seconds. So a thread reads it, and none
reads one that no model could take. Not here: what bodies mean (`openai_requests.py`)."""

import asyncio
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from effuse.protos.errors import InvalidRequest
from effuse.router.few_at_once import FewAtOnce
from effuse.router.findings import MAX_BYTES_PER_TOKEN
from effuse.router.openai_requests import MOST_PROMPTS, Endpoint, Wanted, parse_body, request_of
from effuse.router.seats import Catalogue

AT_ONCE_BYTES: Final = 8 << 10
"""Bodies up to this size are read on the spot: a few milliseconds at worst."""
SPARE_BYTES: Final = 128 << 10
"""For settings, and for notes that concern only the caller."""
_ESCAPE_BYTES: Final = 6  # of JSON, for a character of one byte
_MESSAGE_BYTES: Final = 256  # for names and empty fields of each message; a message has a token
_TEXT_BYTES: Final = _ESCAPE_BYTES * MAX_BYTES_PER_TOKEN


class BodyReader:
    """One per router."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        # The queue of requests limits them later: a burst of long prompts is no reason to refuse.
        self._turns = FewAtOnce(1, most_waiting=math.inf)

    async def read(self, body: bytes, endpoint: Endpoint | None = None) -> Wanted:
        """The requests that a body means, which without an endpoint follows from its fields. Raises
        `InvalidRequest`."""
        if len(body) <= AT_ONCE_BYTES:
            return _read(body, endpoint)
        self._check_size(body, endpoint)
        return await self._turns.run(lambda: asyncio.to_thread(_read, body, endpoint))

    def _check_size(self, body: bytes, endpoint: Endpoint | None) -> None:
        """Raises for more than the longest prompts of any known model, written at their longest.
        White space does not count."""
        tokens = self._catalogue.longest
        prompts = MOST_PROMPTS if endpoint == "completion" else 1
        # A chat has variables of its template, such as tools, which may be as long as the texts.
        own = 0 if endpoint == "completion" else _TEXT_BYTES + _MESSAGE_BYTES
        most = tokens * (prompts * _TEXT_BYTES + own) + SPARE_BYTES
        if not tokens or len(body) <= most:
            return
        if (found := len(body.translate(None, b" \t\r\n"))) > most:
            form = f"at most {most} bytes without spaces (the model accepts {tokens} tokens)"
            raise InvalidRequest.of("", f"expected a body of {form}, got {found}")


def _read(body: bytes, endpoint: Endpoint | None) -> Wanted:
    with _without_collection():
        found = parse_body(body)
        is_chat = found.get("messages") is not None
        try:
            return request_of(found, endpoint or ("chat" if is_chat else "completion"))
        except InvalidRequest as error:
            del found  # a refusal's frames would keep the values until it is sent
            raise error.with_traceback(None) from None


@contextmanager
def _without_collection() -> Iterator[None]:
    """The parser and the checks keep the interpreter lock. Meanwhile the collector would search all
    new values again and again, which takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
