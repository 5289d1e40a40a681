"""A watched answer without a terminal: one plain line for each change."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from effuse.cli.watch import Film, watch
from effuse.v1.generation_pb2 import (
    BlockCommit,
    BlockDraft,
    Finished,
    GenerateStreamResponse,
    PromptEcho,
    PromptProgress,
)

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


def test_a_long_prompt_shows_how_much_of_it_is_computed() -> None:
    out = io.StringIO()
    progress = PromptProgress(computed_tokens=4096, prompt_tokens=131072)
    with watch(Console(file=out, force_terminal=False, width=60)) as show:
        for event in (GenerateStreamResponse(progress=progress), *EVENTS):
            show(event)
    assert out.getvalue().splitlines()[0] == "  |4096 of 131072 tokens of the prompt"
    assert out.getvalue().splitlines()[-1] == "  [a]b"


def test_a_prompt_that_is_asked_for_stands_before_its_answer() -> None:
    out = io.StringIO()
    with watch(Console(file=out, force_terminal=False, width=40)) as show:
        for event in (GenerateStreamResponse(echo=PromptEcho(text="1 + 1 = ")), *EVENTS):
            show(event)
    assert out.getvalue().splitlines()[-2:] == ["  1 + 1 = |[a]\u2591", "  1 + 1 = [a]b"]


def test_a_terminal_shows_every_state_however_fast_they_come() -> None:
    out = io.StringIO()
    with watch(Console(file=out, force_terminal=True, width=40)) as show:
        for event in EVENTS:
            show(event)
    states = ["\u2591\u2591", "[a]", "[a]b"]
    assert all(state in out.getvalue() for state in states)
    assert [out.getvalue().index(state) for state in states] == sorted(
        out.getvalue().index(state) for state in states
    )


def test_a_film_shows_one_frame_after_the_other_and_is_never_far_behind() -> None:
    film = Film()
    assert (film.next_frame().plain, film.is_behind) == ("", False)
    for number in range(100):
        film.frames.append(Text(str(number)))
    assert film.next_frame().plain == "84"
    shown = [film.next_frame().plain for _ in range(16)]
    assert shown == [*(str(number) for number in range(85, 100)), "99"]
    assert not film.is_behind
