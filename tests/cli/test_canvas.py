"""The picture of a streamed answer after each event."""

from __future__ import annotations

from effuse.cli.watch import MASK, Canvas
from effuse.v1 import generation_pb2


def _draft(offset: int, text: str) -> generation_pb2.BlockDraft:
    return generation_pb2.BlockDraft(token_offset=offset, text=text, num_masks=text.count(MASK))


def _commit(offset: int, count: int, text: str) -> generation_pb2.BlockCommit:
    return generation_pb2.BlockCommit(token_offset=offset, num_tokens=count, text=text)


def test_drafts_stand_behind_final_text_in_order() -> None:
    canvas = Canvas()
    canvas.draft(_draft(4, f"c{MASK}"))
    canvas.draft(_draft(-2, f"{MASK}b"))
    assert canvas.line() == f"|{MASK}b|c{MASK}"
    canvas.draft(_draft(-2, "ab"))
    assert canvas.line() == f"|ab|c{MASK}"
    assert canvas.spans() == [("ab", "draft"), ("c", "draft"), (MASK, "mask")]


def test_a_commit_replaces_the_drafts_it_covers() -> None:
    canvas = Canvas()
    canvas.draft(_draft(0, "one "))
    canvas.draft(_draft(4, f"two{MASK}"))
    canvas.commit(_commit(0, 4, "one "))
    assert canvas.line() == f"one |two{MASK}"
    assert canvas.spans()[0] == ("one ", "final")
    assert canvas.num_tokens == 4


def test_the_end_drops_what_was_behind_it() -> None:
    canvas = Canvas()
    canvas.commit(_commit(0, 4, "done\n"))
    canvas.draft(_draft(4, MASK))
    canvas.finish()
    assert canvas.line() == "done / "
