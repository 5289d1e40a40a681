"""OpenAI's HTTP API of a fleet that `effuse up` runs, with clients that people use."""

from __future__ import annotations

import json
import shutil
from typing import Any

import openai
import pytest
from clients.conftest import Tool
from clients.running import ANSWER, HERE, QUESTION, run, run_script
from load.up import Up

CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


def test_curl(http: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": CHAT})
    sent = ("-H", "Content-Type: application/json", "-d", body)
    told = json.loads(run(curl, "-sS", "--max-time", "60", f"{http}/v1/chat/completions", *sent))
    assert told["choices"][0]["message"]["content"].endswith(ANSWER)
    streamed = json.dumps({"messages": CHAT, "stream": True})
    lines = run(
        curl, "-sSN", "--max-time", "60", f"{http}/v1/chat/completions", *sent[:3], streamed
    ).split("\n\n")
    assert len(lines) > 3 and lines[-2:] == ["data: [DONE]", ""]


def test_the_openai_package(http: str, fleet: Up) -> None:
    with openai.OpenAI(base_url=f"{http}/v1", api_key="none", timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["bundled"]
        ask = client.chat.completions.create
        whole = ask(model="bundled", messages=CHAT, temperature=0)
        text = whole.choices[0].message.content
        assert text is not None and text.endswith(ANSWER)
        chunks = list(ask(model="bundled", messages=CHAT, temperature=0, stream=True))
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(pieces) == text and len([one for one in pieces if one]) > 1
        settings = {"algorithm": "block_diffusion", "denoising_steps": 4}
        slow = ask(model="bundled", messages=CHAT, temperature=0, extra_body=settings)
        assert (slow.choices[0].message.content or "").endswith(ANSWER)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model="bundled", messages=CHAT, extra_body={"window": 0})
        assert caught.value.param == "window"
        stream = ask(
            model="bundled", messages=CHAT, stream=True, max_tokens=400,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    assert fleet.held() == []


@pytest.mark.client
def test_langchain(tool: Tool, http: str) -> None:
    python = tool("langchain") / "bin" / "python"
    found = run_script(python, HERE / "langchain_client.py", http, QUESTION)
    assert found["text"].endswith(ANSWER) and found["streamed"] == found["text"]
    assert found["batch"] == [found["text"]] * 2 and found["tokens"] > 3
