"""`effuse-router`: parses the flags, joins the parts, serves until SIGTERM. No logic."""

from __future__ import annotations

import asyncio
import logging
import sys

from effuse.placement.store import Store
from effuse.protos.rpc import shutdown_signal
from effuse.router.config import RouterConfig, parse
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory


def main() -> None:
    """Entry point."""
    config = parse(sys.argv[1:])
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)-7s router: %(message)s"
    )
    try:
        tokenizer = Tokenizer.load(
            config.model or bundled_directory(), threads=config.tokenizer_threads
        )
        asyncio.run(run(config, tokenizer))
    except (TokenizerError, OSError) as error:
        sys.exit(f"effuse-router: {error}")


async def run(config: RouterConfig, tokenizer: Tokenizer) -> None:
    """Serves until a signal comes."""
    async with shutdown_signal() as stop, Store(config.redis_url, config.fleet) as store:
        await Router(config, tokenizer, store).serve(stop)


if __name__ == "__main__":
    main()
