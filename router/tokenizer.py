"""Text to ids and back, with the `tokenizers` library alone, off the event loop where it is long.

Special tokens that a client spells in its text stay text; those that the checkpoint's own template
puts around a prompt are added. Not here: following an answer (`detokenizer.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import tokenizers

FILE: Final = "tokenizer.json"
INLINE_BYTES: Final = 512
"""Text up to this size is encoded on the spot: about 0.2 ms at worst, as much as two switches of
thread cost on a busy machine."""

_RESERVED: Final = re.compile(r"pad|mask|unk|reserved", re.IGNORECASE)


class TokenizerError(Exception):
    """A checkpoint directory has no tokenizer that can be used here."""


class Tokenizer:
    """A checkpoint's tokenizer. Usable from one event loop; `close` ends its threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, threads: int = 2) -> None:
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        added = backend.get_added_tokens_decoder().items()
        self._special = frozenset(i for i, token in added if token.special)
        bytes_ = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._bytes = frozenset(i for i in bytes_ if i is not None)
        self.reserved_ids: frozenset[int] = frozenset(
            i for i, token in added if token.special and _RESERVED.search(token.content)
        )

    @classmethod
    def load(cls, directory: Path, *, threads: int = 2) -> Tokenizer:
        """Reads `tokenizer.json` of a checkpoint directory; raises `TokenizerError`."""
        path = directory / FILE
        if not path.is_file():
            raise TokenizerError(
                f"{directory} has no {FILE}; make one with "
                f"`effuse convert-tokenizer {directory}`, once"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
        return cls(backend, threads=threads)

    async def encode(self, text: str) -> list[int]:
        """The ids of a prompt; its special tokens come from the checkpoint's template alone."""
        if len(text) <= INLINE_BYTES:
            return self._encode(text)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text)

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for text: known, and not special."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte of a run, which becomes text as a whole or not at
        all (the byte fallback of SentencePiece vocabularies)."""
        return token_id in self._bytes

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids that all are text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def close(self) -> None:
        """Ends the threads; what they encode now is finished first."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str) -> list[int]:
        # `encode` keeps the interpreter lock, and with it the event loop, for as long as it takes.
        ids: list[int] = self._backend.encode_batch_fast([text])[0].ids
        return ids


def bundled_directory() -> Path:
    """Where the bundled model's files are, found without importing anything of `models`."""
    spec = find_spec("effuse.models")
    assert spec is not None and spec.submodule_search_locations, "the package lacks its models"
    return Path(spec.submodule_search_locations[0]) / "bundled"
