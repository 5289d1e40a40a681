"""A watched answer: one plain line a change where nobody sits at a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from effuse.cli.watch import watch
from effuse.v1.generation_pb2 import BlockCommit, BlockDraft, Finished, GenerateStreamResponse

EVENTS = (
    GenerateStreamResponse(draft=BlockDraft(token_offset=0, text="\u2591\u2591")),
    GenerateStreamResponse(draft=BlockDraft(token_offset=0, text="[a]\u2591")),
    GenerateStreamResponse(draft=BlockDraft(token_offset=0, text="[a]\u2591")),
    GenerateStreamResponse(commit=BlockCommit(token_offset=0, num_tokens=2, text="[a]b")),
    GenerateStreamResponse(finished=Finished()),
)


def test_plain_lines_when_piped() -> None:
    out = io.StringIO()
    with watch(Console(file=out, force_terminal=False, width=40)) as show:
        for event in EVENTS:
            show(event)
    assert out.getvalue().splitlines() == ["  |\u2591\u2591", "  |[a]\u2591", "  [a]b"]


def test_a_terminal_keeps_the_last_state() -> None:
    out = io.StringIO()
    with watch(Console(file=out, force_terminal=True, width=40)) as show:
        for event in EVENTS:
            show(event)
    assert "[a]b" in out.getvalue()
