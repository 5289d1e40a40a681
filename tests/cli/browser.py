"""A headless Chromium that is installed here, driven over its pipe (`--remote-debugging-pipe`): no
driver, no port, nothing downloaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eventually import is_readable
from slowness import patient

VARIABLE = "EFFUSE_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--single-process"),
    *("--no-zygote", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
DEADLINE_S = patient(60.0)


def installed() -> str | None:
    """Path of a browser; the variable EFFUSE_BROWSER has precedence."""
    named = os.environ.get(VARIABLE)
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One open page."""

    said: int  # descriptors of the pipe
    told: int
    session: str = ""
    number: int = 0
    heard: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; its result."""
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.said, json.dumps(asked).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def visit(self, address: str) -> None:
        """Open an address and wait until it has loaded: before, nothing can be evaluated in it."""
        self.ask("Page.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        loader = self.ask("Page.navigate", url=address)["loaderId"]
        while not any(_loaded(event, loader) for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The same, as soon as it is true there."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self.evaluate(expression)):
            shown = self.evaluate("document.body.innerText")
            assert time.monotonic() < deadline, f"{expression} is not true of {shown}"
            time.sleep(0.02)
        return value

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.heard:
            ready = is_readable(self.told, DEADLINE_S)
            more = os.read(self.told, 1 << 16) if ready else b""
            assert more, "the browser says nothing"
            self.heard += more
        message, _, self.heard = self.heard.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _loaded(event: dict[str, Any], loader: str) -> bool:
    """Whether it reports that the page of this loader is there."""
    said: dict[str, Any] = event.get("params", {})
    return {"name": "load", "loaderId": loader}.items() <= said.items()


@contextmanager
def opened(browser: str, address: str) -> Iterator[Page]:
    """The page at an address; the browser ends with it."""
    (reads, said), (told, writes) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="effuse-browser-") as home:
        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        command = ["bash", "-c", shell, browser, *FLAGS, f"--user-data-dir={home}", "about:blank"]
        with subprocess.Popen(
            command, pass_fds=(reads, writes), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as child:
            os.close(reads)
            os.close(writes)
            try:
                page = Page(said, told)
                target = page.ask("Target.createTarget", url="about:blank")["targetId"]
                attached = page.ask("Target.attachToTarget", targetId=target, flatten=True)
                page.session = attached["sessionId"]
                page.visit(address)
                yield page
            finally:
                child.kill()
                os.close(said)
                os.close(told)
