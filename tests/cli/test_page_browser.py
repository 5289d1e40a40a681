"""The page of `effuse up` in a real browser, where one is installed: workers, and a request whose
blocks fill in while it is looked at."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from cli.browser import VARIABLE, Page, installed, opened
from e2e.tiny import tiny_checkpoint

from effuse.cli.fleet import Fleet, FleetConfig
from effuse.cli.page import PageSource, served
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

pytestmark = pytest.mark.client

# Everything that the cells of requests have ever held, in its order.
WATCH = """
window.seen = [];
new MutationObserver(() => {
  for (const one of document.querySelectorAll("#requests .cells")) {
    const now = one.textContent;
    if (now && seen[seen.length - 1] !== now) seen.push(now);
  }
}).observe(document.getElementById("requests"), { childList: true, subtree: true });
"""


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
        "seen.some((one) => one.includes('\\u2591')) && seen.some((one) => /\\u25a0/.test(one))"
    )
    enough.set()
    asking.join(60)
    page.until("document.querySelectorAll('#requests tr').length === 0")
    seen = page.evaluate("seen")
    masks = [one.count("\u2591") for one in seen]
    final = [one.count("\u25a0") for one in seen]
    assert len(set(masks)) > 1, "masks are seen to become tokens"
    assert max(final) > min(final), "blocks are seen to become final"
    assert page.evaluate("document.getElementById('error').textContent") == ""


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
