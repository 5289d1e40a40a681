"""The page of `effuse up` in a real browser, if one is installed: workers, and a request whose
blocks fill in while it is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from cli.browser import VARIABLE, Page, installed, opened
from e2e.tiny import tiny_checkpoint

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.page import PageSource, served
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

pytestmark = pytest.mark.client

# Everything that the blocks of requests have ever shown, in its order.
WATCH = """
window.seen = [];
new MutationObserver(() => {
  for (const one of document.querySelectorAll("#requests td:last-child")) {
    const now = one.textContent;
    if (now && seen[seen.length - 1] !== now) seen.push(now);
  }
}).observe(document.getElementById("requests"), { childList: true, subtree: true });
"""
NUMBER = "document.querySelector('#tokens strong').textContent"


@pytest.fixture(scope="module")
def browser() -> str:
    found = installed()
    if found is None:
        pytest.skip(f"no Chromium is installed; {VARIABLE} may name one")
    return found


@pytest.fixture(scope="module")
def fleet(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = FleetConfig(
        model=tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar"),
        worker_flags=("--device", "cpu", "--num-pages", "64", "--max-model-len", "512"),
    )
    with Fleet(config) as running:
        yield running


@pytest.fixture
def page(browser: str, fleet: Fleet) -> Iterator[Page]:
    with (
        served(PageSource(fleet.address, fleet.metrics), 0) as address,
        opened(browser, address) as opened_page,
    ):
        yield opened_page


def test_workers_are_shown_and_blocks_fill_in(page: Page, fleet: Fleet) -> None:
    page.until("document.querySelectorAll('#workers tr').length === 2")
    rows = page.evaluate("document.getElementById('workers').innerText")
    assert "prefill" in rows and "decode" in rows and rows.count("ready") == 2
    assert "64" in rows, "the pages of its pool"
    page.evaluate(WATCH)
    enough = threading.Event()
    asking = threading.Thread(target=_ask, args=(fleet, enough))
    asking.start()
    page.until(
        "seen.some((one) => one.includes('\\u2591')) && seen.some((one) => /^[1-9]/.test(one))"
    )
    page.until("document.querySelector('#tokens .one') && parseFloat(" + NUMBER + ") > 0")
    page.until("document.querySelector('#first strong').textContent.endsWith('s')")
    bar = page.evaluate("document.querySelector('#requests .bar .track').getAttribute('width')")
    assert bar == "50", "400 tokens in blocks of 8"
    labels = page.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map((one) => one.ariaLabel)"
    )
    assert labels[0].startswith("tokens per second: now ") and "blocks final" in labels[3]
    enough.set()
    asking.join(60)
    page.until("document.querySelectorAll('#requests tr').length === 0")
    seen = page.evaluate("seen")
    masks = [one.count("\u2591") for one in seen]
    final = [int(one.split()[0]) for one in seen]
    assert len(set(masks)) > 1, "masks are seen to become tokens"
    assert max(final) > min(final), "blocks are seen to become final"
    assert page.evaluate("document.getElementById('error').textContent") == ""


@pytest.mark.parametrize("width", [360, 480, 1200])
def test_it_fits_a_phone_and_follows_dark_mode(page: Page, width: int) -> None:
    page.until("document.querySelectorAll('#workers tr').length === 2")
    grounds = []
    for mode in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": mode}]
        page.ask("Emulation.setEmulatedMedia", features=features)
        page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        page.until(f"window.innerWidth === {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    shown = page.evaluate(
        "getComputedStyle(document.querySelector('#workers td'), '::before').content"
    )
    assert shown == ("none" if width == 1200 else '"worker"'), "cells carry their headings"


def test_it_is_paused_by_the_keyboard(page: Page) -> None:
    page.until("document.querySelectorAll('#workers tr').length === 2")
    page.evaluate("document.getElementById('pause').focus()")
    for kind in ("keyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", text=" ")
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    page.evaluate("document.getElementById('workers').replaceChildren()")
    page.evaluate("window.before = performance.now()")
    page.until("performance.now() - before > 1500")
    assert page.evaluate("document.querySelectorAll('#workers tr').length") == 0
    page.evaluate("document.getElementById('pause').click()")
    page.until("document.querySelectorAll('#workers tr').length === 2")


def _ask(fleet: Fleet, enough: threading.Event) -> None:
    """Long requests, one after the other, until one was seen at work."""
    decoding = pb.DecodingParams(
        algorithm=pb.ALGORITHM_BLOCK_DIFFUSION,
        remasking=pb.REMASKING_LOW_CONFIDENCE_STATIC,
        denoising_steps=8,
    )
    stopping = pb.StoppingParams(max_tokens=400, ignore_eos=True)
    with grpc.insecure_channel(fleet.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while not enough.is_set():
            ids = pb.TokenIds(ids=[5, 6, 7])
            asked = pb.GenerateRequest(prompt_token_ids=ids, stopping=stopping, decoding=decoding)
            stub.Generate(asked, timeout=60)
