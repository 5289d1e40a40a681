"""Between the wire and the engine's socket: round trips, and refusals of too large values."""

from __future__ import annotations

import math

import fronts
import msgspec
import pytest

from effuse.config.decoding import LOGPROBS, WITHIN, Sampling
from effuse.protos.channels import filled
from effuse.protos.errors import InvalidRequest
from effuse.v1 import generation_pb2
from effuse.v1 import worker_pb2 as pb
from effuse.worker import wire
from effuse.worker.messages import PushTo, StartDecode, ToEngine


def test_a_reservation_survives_both_ways() -> None:
    sent = fronts.reservation("a").reservation
    first = sent.shards[0]
    first.agent_metadata = b"\x00\xff"
    first.pool_address = 1 << 47
    first.memory_kind = "DRAM"
    sent.shards.add(endpoint="tcp://127.0.0.1:2", first_head=1, end_head=2, page_bytes=64)
    sent.shards[1].first_group, sent.shards[1].end_group = 1, 3
    for shard in sent.shards:
        shard.context_degree = 1
    assert wire.reservation_to_proto(wire.reservation(sent)) == sent


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r.shards[0], "page_bytes", 0),
        lambda r: setattr(r, "lease_s", 0.0),
        lambda r: setattr(r, "lease_s", float("nan")),
        lambda r: setattr(r, "incarnation", ""),
        lambda r: setattr(r.shards[0], "memory_kind", "TAPE"),
        lambda r: setattr(r.shards[0], "pool_address", 1 << 63),
        lambda r: setattr(r.shards[0], "agent_metadata", b"x" * (1 << 21)),
        lambda r: setattr(r.shards[0], "end_head", 0),
        lambda r: setattr(r.shards[0], "end_group", 0),
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
    told = generation_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[5, 6], top_logprobs=[-0.5, -2])
    sent = pb.BlockState(
        token_ids=[5, 99], masks=b"\x02", full=True, denoise_count=3,
        logprobs=[told, generation_pb2.TokenLogprobs()],
    )  # fmt: skip
    (block,) = wire.resume(pb.Resume(frontier=[sent]), block_size=2).frontier
    assert filled(pb.BlockState, block) == sent


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_are_one_for_each_position(count: int) -> None:
    told = [generation_pb2.TokenLogprobs()] * count
    sent = pb.BlockState(token_ids=[5, 99], masks=b"\x02", logprobs=told)
    with pytest.raises(InvalidRequest, match="none or 2"):
        wire.resume(pb.Resume(frontier=[sent]), block_size=2)
    told = [generation_pb2.TokenLogprobs(top_token_ids=[1])] * 2
    sent = pb.BlockState(token_ids=[5, 99], masks=b"\x02", logprobs=told)
    with pytest.raises(InvalidRequest, match="1 of them"):
        wire.resume(pb.Resume(frontier=[sent]), block_size=2)


def test_what_changes_logits_is_read_and_checked() -> None:
    assert wire.sampling(pb.DecodeSampling(top_p=1)) == Sampling()
    sent = pb.DecodeSampling(top_p=1, min_p=0.5, repetition_penalty=2, logit_bias={9: 1, 4: -2})
    expected = Sampling(min_p=0.5, repetition_penalty=2, logit_bias=((4, -2), (9, 1)))
    assert wire.sampling(sent) == expected
    for wrong, field in (
        (pb.DecodeSampling(top_p=1, repetition_penalty=0), "sampling.repetition_penalty"),
        (pb.DecodeSampling(top_p=1, answer_index=64), "sampling.answer_index"),
        (pb.DecodeSampling(top_p=1, logit_bias={4: math.nan}), "sampling.logit_bias"),
        (pb.DecodeSampling(top_p=1, logit_bias=dict.fromkeys(range(513), 1)), "513 ids"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            wire.sampling(wrong)
    with pytest.raises(InvalidRequest, match="min_tokens: expected at most max_tokens 4"):
        wire.stopping(pb.DecodeRequest(max_tokens=4, min_tokens=5))
    with pytest.raises(InvalidRequest, match="num_logprobs"):
        wire.bounded(pb.DecodeRequest(num_logprobs=21), "num_logprobs", LOGPROBS)
    assert wire.bounded(pb.DecodeRequest(num_logprobs=0), "num_logprobs", LOGPROBS) == 0
    assert wire.sampling(pb.DecodeSampling(top_p=1, answer_index=3)).answer_index == 3
    assert wire.label("g" * 128, "group") == "g" * 128
    with pytest.raises(InvalidRequest, match="group: expected at most 128 characters, got 129"):
        wire.label("g" * 129, "group")
    assert wire.bounded(pb.DecodeRequest(), "gap_s", WITHIN) is None
    assert wire.bounded(pb.DecodeRequest(gap_s=0.1), "gap_s", WITHIN) == 0.1
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="gap_s: expected a number above 0, at most 3600"):
            wire.bounded(pb.DecodeRequest(gap_s=bad), "gap_s", WITHIN)


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
        gap_s=0.25,
    )
    push = PushTo(reservation=wire.reservation(fronts.reservation("a").reservation))
    for message in (start, push):
        frame = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(frame, type=ToEngine) == message
