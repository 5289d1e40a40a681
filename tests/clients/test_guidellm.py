"""guidellm, a load generator for OpenAI's HTTP API: streams of chats and of completions.

`make clients CLIENTS=guidellm` installs it; it takes 6 GB.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clients.conftest import Tool
from clients.running import run
from load.up import Up

pytestmark = pytest.mark.client
COUNT = 12
TOKENS = 24


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(route: str, tool: Tool, http: str, fleet: Up, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    asked = [
        {"prompt": f"Find the value of {at} + 561.", "output_tokens_count": TOKENS}
        for at in range(COUNT)
    ]
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    run(
        tool("guidellm") / "bin" / "guidellm", "run",
        *("--backend", f"kind=openai_http,target={http},request_format={route}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={COUNT}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (COUNT, 0, 0)
    for one in benchmark["requests"]["successful"]:
        assert one["output_metrics"]["text_tokens"] == TOKENS, "it asks for usage in the stream"
        assert one["info"]["timings"]["request_iterations"] > 1, "blocks came one by one"
    assert fleet.held() == []
