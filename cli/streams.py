"""Standard streams and text files of a command, independent of the locale.

A character that the terminal cannot show gets a substitute, and incoming text is UTF-8. Line ends
stay. A byte-order mark at the beginning is dropped, because it is not part of the text.
"""

import codecs
import io
import os
import sys
from pathlib import Path
from typing import Final

_STAND_INS: Final = {
    "\u2591": ".",  # a mask
    "\u2588": "#",  # a written token
    "\u25a0": "=",  # a final block
    "\u2026": "~",  # the place where a line was cut
    "\u2501": "-",  # a progress bar, and its ends
    "\u2578": "-",
    "\u257a": "-",
}


def settle() -> None:
    """Prepares standard input, output and error; a closed one becomes /dev/null."""
    codecs.register_error("effuse", _stand_in)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # it stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="effuse")


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """The substitute for characters that the encoding lacks; bytes of file names are escaped."""
    assert isinstance(error, UnicodeEncodeError), "this handler only serves output"
    lacking = error.object[error.start : error.end]
    shown = (
        one.encode("unicode_escape").decode()
        if "\ud800" <= one <= "\udfff"
        else _STAND_INS.get(one, "?")
        for one in lacking
    )
    return "".join(shown), error.end


def read_text(path: Path) -> str:
    """A file's text. Raises OSError, and ValueError if it is not UTF-8."""
    return _decoded(path.read_bytes(), f"in {path}")


def read_standard_input() -> str:
    """All of standard input. Raises ValueError if it is not UTF-8."""
    return _decoded(sys.stdin.buffer.read(), "on standard input")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        raise ValueError(f"expected UTF-8 text {where}, got {found}") from None
