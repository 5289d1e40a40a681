"""A router's process: parses the flags, joins the parts, serves until SIGTERM. No logic."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from effuse.placement.store import Store
from effuse.protos.rpc import shutdown_signal
from effuse.router.config import RouterConfig, parse
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory


def serve(argv: Sequence[str]) -> None:
    """Runs a router until a signal comes; SystemExit with one line where it cannot."""
    config = parse(argv)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)-7s router: %(message)s"
    )
    errors: list[str] = []
    try:
        tokenizer = Tokenizer.load(
            config.model or bundled_directory(), threads=config.tokenizer_threads
        )
        asyncio.run(run(config, tokenizer))
    except* (TokenizerError, OSError) as failed:
        errors = _texts(failed)
    if errors:
        sys.exit(f"effuse-router: {'; '.join(errors)}")


async def run(config: RouterConfig, tokenizer: Tokenizer) -> None:
    """Serves until a signal comes."""
    async with shutdown_signal() as stop, Store(config.redis_url, config.fleet) as store:
        await Router(config, tokenizer, store).serve(stop)


def _texts(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """What the errors of a group of groups say."""
    texts: list[str] = []
    for error in group.exceptions:
        texts += _texts(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return texts
