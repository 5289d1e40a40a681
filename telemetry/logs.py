"""Log lines of a process on standard error: text for people, or JSON for programs.

A record may have figures in addition to its message (`extra=figures(..)`): text shows `name=value`,
JSON has members of the same object. Uncaught exceptions and warnings, which Python itself would
print, become records too. Output of native libraries to standard error is not covered.
"""

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
"""Lowest level of messages that a process logs."""
LogFormat = Literal["text", "json"]

LOG: Final = logging.getLogger(__name__)
_FIGURES: Final = "figures"
_SPLITS: Final = re.compile(r'[ "=\n]')

Figures = Mapping[str, str | int | float]


def set_up(process: str, level: LogLevel, form: LogFormat = "text") -> None:
    """Logs to standard error from now on, which never makes the process wait (`output.py`); each
    line has the name `process`.
    """
    log_by(JsonLines(process) if form == "json" else TextLines(process), level)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value, args.exc_traceback
        )


def log_by(formatter: logging.Formatter, level: LogLevel = "info") -> None:
    """Logs to standard error with this formatter, including notices of dropped lines."""

    def notice(lines: int) -> str:
        text = "dropped %d lines, because this output was not read"
        return formatter.format(
            LOG.makeRecord(LOG.name, logging.WARNING, "", 0, text, (lines,), None)
        )

    output.never_wait(notice)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def figures(values: Figures) -> dict[str, Figures]:
    """The argument `extra` for a logger."""
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
    """One JSON object for each record, with its traceback; times are UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The object; its own members take precedence over figures of the same name."""
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
        LOG.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))
