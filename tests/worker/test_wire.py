"""Between the wire and the engine's socket: what goes in comes out, what is too large does not."""

from __future__ import annotations

import fronts
import msgspec
import pytest

from effuse.protos.errors import InvalidRequest
from effuse.v1 import worker_pb2 as pb
from effuse.worker import wire
from effuse.worker.messages import PushTo, StartDecode, ToEngine


def test_a_reservation_survives_both_ways() -> None:
    sent = fronts.reservation("a").reservation
    sent.agent_metadata = b"\x00\xff"
    sent.pool_address = 1 << 47
    sent.memory_kind = "DRAM"
    assert wire.reservation_to_proto(wire.reservation(sent)) == sent


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r, "page_bytes", 0),
        lambda r: setattr(r, "lease_s", 0.0),
        lambda r: setattr(r, "lease_s", float("nan")),
        lambda r: setattr(r, "incarnation", ""),
        lambda r: setattr(r, "memory_kind", "TAPE"),
        lambda r: setattr(r, "pool_address", 1 << 63),
        lambda r: setattr(r, "agent_metadata", b"x" * (1 << 21)),
        lambda r: r.pages.add(page_id=99, generation=0),
        lambda r: r.fingerprint.add(name="x" * 200, value=""),
    ],
)
def test_a_wrong_reservation_never_reaches_the_engine(change: object) -> None:
    sent = fronts.reservation("a").reservation
    change(sent)  # type: ignore[operator]
    with pytest.raises(InvalidRequest, match="reservation"):
        wire.reservation(sent)


def test_a_block_survives_both_ways() -> None:
    sent = pb.BlockState(token_ids=[5, 99], masks=b"\x02", full=True, denoise_count=3)
    (block,) = wire.resume(pb.Resume(frontier=[sent]), block_size=2).frontier
    assert wire.block_to_proto(block) == sent


def test_messages_to_the_engine_survive_its_socket() -> None:
    request = fronts.decode_request("a", "life")
    request.stop_token_ids.extend([1, 5])
    start = StartDecode(
        attempt=wire.attempt_id(request.attempt),
        prompt_token_ids=wire.prompt(request.prompt_token_ids),
        stopping=wire.stopping(request),
        sampling=wire.sampling(pb.DecodeSampling(top_p=0.5, seed=(1 << 64) - 1)),
        settings=wire.settings(request.settings),
        writer=None,
    )
    push = PushTo(reservation=wire.reservation(fronts.reservation("a").reservation))
    for message in (start, push):
        frame = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(frame, type=ToEngine) == message
