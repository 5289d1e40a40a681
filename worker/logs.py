"""Log lines of a worker's processes: one line each, to standard error, with the process's name."""

import logging
import sys

from effuse.config.flags import LogLevel


def set_up(process: str, level: LogLevel) -> None:
    """Logs to standard error at `level`; `process` says which one of a worker's two speaks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
