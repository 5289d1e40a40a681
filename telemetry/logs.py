"""Log lines of a process, one each, to standard error: for people, or JSON for programs.

A record may carry figures beside its message (`extra=figures(..)`): `name=value` behind it for
people, members of the same object as JSON. What Python itself would print, uncaught exceptions and
warnings, becomes a record, too. Not here: what native libraries write to standard error.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal

from effuse.telemetry import output

LogLevel = Literal["debug", "info", "warning", "error"]
"""Least severe messages that a process logs."""
LogFormat = Literal["text", "json"]

LOG: Final = logging.getLogger(__name__)
_FIGURES: Final = "figures"
_SPLITS: Final = re.compile(r'[ "=\n]')

Figures = Mapping[str, str | int | float]


def set_up(process: str, level: LogLevel, form: LogFormat = "text") -> None:
    """Logs to standard error from now on, which never makes the process wait (`output.py`);
    `process` is named in each line."""
    log_by(JsonLines(process) if form == "json" else TextLines(process), level)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value, args.exc_traceback
        )


def log_by(formatter: logging.Formatter, level: LogLevel = "info") -> None:
    """Logs to standard error with this formatter, the notice of dropped lines included."""

    def notice(lines: int) -> str:
        text = "%d lines were dropped, because this output was not read"
        return formatter.format(
            LOG.makeRecord(LOG.name, logging.WARNING, "", 0, text, (lines,), None)
        )

    output.never_wait(notice)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def figures(values: Figures) -> dict[str, Figures]:
    """What to hand to a logger as `extra`."""
    return {_FIGURES: values}


class TextLines(logging.Formatter):
    """Time, level, process, logger, message, figures."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        told = [f"{name}={_plain(value)}" for name, value in _figures_of(record).items()]
        return " ".join([super().formatMessage(record), *told])


class JsonLines(logging.Formatter):
    """One JSON object a record, a traceback included; times are UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The object; its own members go before figures of the same name."""
        line: dict[str, object] = {
            **_figures_of(record),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


def _figures_of(record: logging.LogRecord) -> Figures:
    found: Figures = getattr(record, _FIGURES, {})
    return found


def _plain(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text or _SPLITS.search(text) else text


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        LOG.critical("%s is not caught", kind.__name__, exc_info=(kind, error, trace))
