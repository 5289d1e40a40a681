"""The picture of a streamed answer after each event."""

from __future__ import annotations

from effuse.cli.watch import MASK, Canvas
from effuse.client.answer import Event
from effuse.v1 import generation_pb2


def _draft(offset: int, text: str) -> Event:
    masks = text.count(MASK)
    draft = generation_pb2.BlockDraft(token_offset=offset, text=text, num_masks=masks)
    return Event(draft=draft)


def _commit(offset: int, count: int, text: str) -> Event:
    commit = generation_pb2.BlockCommit(token_offset=offset, num_tokens=count, text=text)
    return Event(commit=commit)


def test_drafts_stand_behind_final_text_in_order() -> None:
    canvas = Canvas()
    canvas.apply(_draft(4, f"c{MASK}"))
    canvas.apply(_draft(-2, f"{MASK}b"))
    assert canvas.line() == f"|{MASK}b|c{MASK}"
    canvas.apply(_draft(-2, "ab"))
    assert canvas.line() == f"|ab|c{MASK}"
    assert canvas.spans() == [("ab", "draft"), ("c", "draft"), (MASK, "mask")]


def test_a_commit_replaces_the_drafts_it_covers() -> None:
    canvas = Canvas()
    canvas.apply(_draft(0, "one "))
    canvas.apply(_draft(4, f"two{MASK}"))
    canvas.apply(_commit(0, 4, "one "))
    assert canvas.line() == f"one |two{MASK}"
    assert canvas.spans()[0] == ("one ", "final")
    assert canvas.num_tokens == 4


def test_the_end_drops_what_was_behind_it() -> None:
    canvas = Canvas()
    canvas.apply(_commit(0, 4, "done\n"))
    canvas.apply(_draft(4, MASK))
    canvas.apply(Event(finished=generation_pb2.Finished()))
    assert canvas.line() == "done / "
