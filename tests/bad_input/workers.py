"""Mistakes of a stranger, or of a router of another version, in calls to a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from bad_input.case import Case
from bad_input.requests import Facts
from fronts import SETTINGS

from effuse.v1 import generation_pb2
from effuse.v1 import worker_pb2 as pb

DECODE = "/effuse.v1.DecodeService/Decode"
REHEARSE = "/effuse.v1.DecodeService/Rehearse"
PREFILL = "/effuse.v1.PrefillService/Prefill"
WORKER = "/effuse.v1.WorkerService"
PROMPT = [5, 6, 7, 8]


def attempt(name: str, **changes: Any) -> pb.AttemptId:
    """A new attempt, unless `changes` has others."""
    fields: dict[str, Any] = {
        "request_id": f"bad-{name}",
        "attempt": 1,
        "transfer_id": f"bad-{name}",
    }
    return pb.AttemptId(**(fields | changes))


def decode_request(name: str, incarnation: str) -> pb.DecodeRequest:
    """A good one that the decode worker prefills itself."""
    return pb.DecodeRequest(
        attempt=attempt(name),
        incarnation=incarnation,
        prompt_token_ids=PROMPT,
        max_tokens=3,
        sampling=pb.DecodeSampling(top_p=1.0),
        settings=SETTINGS,
        local=pb.LocalPrefill(),
    )


def worker_cases(at: Facts, decode: str, prefill: str) -> Iterator[tuple[str, Case]]:
    """All of them, by name; `decode` and `prefill` are the lives of the two engines."""
    for number, (name, change, field) in enumerate([*_decode_changes(at), *_resumes(at)]):
        request = decode_request(f"d{number}", decode)
        change(request)
        yield f"decode: {name}", Case(method=DECODE, sent=[request], field=field, to="decode-0")
    yield from _lives(decode)
    yield from _rehearsals(decode)
    yield from _prefills(at, prefill)
    yield from _calls()


DecodeChange = Callable[[pb.DecodeRequest], object]


def _sampling(**fields: Any) -> DecodeChange:
    return lambda r: r.sampling.MergeFrom(pb.DecodeSampling(**fields))


def _settings(**fields: Any) -> DecodeChange:
    return lambda r: r.settings.MergeFrom(pb.DecodeSettings(**fields))


def _set(**fields: Any) -> DecodeChange:
    return lambda r: r.MergeFrom(pb.DecodeRequest(**fields))


def _remote(address: str = "127.0.0.1:1", incarnation: str = "w", port: int = 1) -> DecodeChange:
    writer = pb.WorkerRef(address=address, incarnation=incarnation, engine_port=port)
    return lambda r: r.remote.CopyFrom(writer)


def _decode_changes(at: Facts) -> Iterator[tuple[str, DecodeChange, str]]:
    yield "no attempt", lambda r: r.ClearField("attempt"), "attempt.request_id"
    yield "long request id", _set(attempt=attempt("", request_id="a" * 129)), "attempt.request_id"
    yield "no transfer", lambda r: r.attempt.ClearField("transfer_id"), "attempt.transfer_id"
    yield "attempt 0", lambda r: r.attempt.ClearField("attempt"), "attempt.attempt"
    yield "no prompt", lambda r: r.ClearField("prompt_token_ids"), "prompt_token_ids"
    yield "id beyond the vocabulary", _set(prompt_token_ids=[at.vocab_size]), ""
    yield "long prompt", _set(prompt_token_ids=[5] * at.max_model_len), "prompt"
    yield "max_tokens 0", lambda r: r.ClearField("max_tokens"), "max_tokens"
    yield "max_tokens of 32 bits", _set(max_tokens=2**32 - 1), "max_tokens"
    yield "max_tokens beyond the context", _set(max_tokens=at.max_model_len), "prompt"
    yield "min_tokens above max_tokens", _set(min_tokens=4), "min_tokens"
    yield "stop id beyond the vocabulary", _set(stop_token_ids=[2**32 - 1]), ""
    yield "too many stop ids", _set(stop_token_ids=range(40)), "stopping.stop_token_ids"
    yield "num_logprobs", _set(num_logprobs=21), "num_logprobs"
    yield "nobody prefills", lambda r: r.ClearField("local"), "prefill"
    yield "top_p 0", lambda r: r.sampling.ClearField("top_p"), "sampling.top_p"
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        yield f"{name} nan", _sampling(**{name: math.nan}), f"sampling.{name}"
    yield "repetition_penalty", _sampling(repetition_penalty=0.0), "sampling.repetition_penalty"
    yield "bias inf", _sampling(logit_bias={5: math.inf}), "sampling.logit_bias"
    yield "bias beyond the vocabulary", _sampling(logit_bias={at.vocab_size: 1.0}), ""
    for name in ("algorithm", "score", "remasking", "alg", "cache"):
        yield f"unknown {name}", _settings(**{name: "no such"}), f"settings.{name}"
    for name in ("confidence_threshold", "block_add_threshold", "full_activation_threshold"):
        yield f"{name} nan", _settings(**{name: math.nan}), f"settings.{name}"
    yield "window 0", lambda r: r.settings.ClearField("window"), "settings.window"
    yield "window beyond the slots", _settings(window=60), "decoding.window"
    yield "steps 0", lambda r: r.settings.ClearField("denoising_steps"), "settings.denoising_steps"
    long_steps = _settings(denoising_steps=at.block_size + 1)
    yield "steps beyond a block", long_steps, "decoding.denoising_steps"
    yield "entropy", _settings(entropy_bound=-1.0), "settings.entropy_bound"
    yield "editing", _settings(editing_threshold=2.0), "settings.editing_threshold"
    yield "post steps", _settings(max_post_steps=2000), "settings.max_post_steps"
    yield "factor", _settings(factor=math.inf), "settings.factor"
    yield "an algorithm of other models", _settings(algorithm="llada"), "decoding.algorithm"
    yield "writer without a port", _remote(address="127.0.0.1"), "remote.address"
    yield "writer at port 70000", _remote(address="127.0.0.1:70000"), "remote.address"
    yield "writer nowhere", _remote(address=""), "remote.address"
    yield "writer without a life", _remote(incarnation=""), "remote.incarnation"
    yield "writer without an engine", _remote(port=0), "remote.engine_port"
    yield "writer's engine at port 70000", _remote(port=70000), "remote.engine_port"


def _resumes(at: Facts) -> Iterator[tuple[str, DecodeChange, str]]:
    size, num_bytes = at.block_size, at.block_size // 8
    told = generation_pb2.TokenLogprobs
    frontier: Sequence[tuple[str, pb.BlockState, str]] = (
        ("short block", pb.BlockState(token_ids=[5], masks=b"\1"), "resume.frontier[0].token_ids"),
        (
            "long masks", pb.BlockState(token_ids=[5] * size, masks=b"\0" * (num_bytes + 1)),
            "resume.frontier[0].masks",
        ),
        (
            "a log-probability too few",
            pb.BlockState(token_ids=[5] * size, masks=b"\0" * num_bytes, logprobs=[told()]),
            "resume.frontier[0].logprobs",
        ),
        (
            "a likeliest id too many",
            pb.BlockState(
                token_ids=[5] * size, masks=b"\0" * num_bytes,
                logprobs=[told(top_token_ids=[5])] * size,
            ),
            "logprobs.top_logprobs",
        ),
        ("foreign ids", pb.BlockState(token_ids=[2**32 - 1] * size, masks=b"\0" * num_bytes), ""),
    )  # fmt: skip
    for name, block, field in frontier:
        yield f"resume, {name}", _set(resume=pb.Resume(frontier=[block])), field
    yield "resume, foreign text", _set(resume=pb.Resume(committed_token_ids=[at.vocab_size])), ""
    yield "resume, more than the answer", _set(resume=pb.Resume(committed_token_ids=[5] * 9)), ""


def _lives(decode: str) -> Iterator[tuple[str, Case]]:
    over = grpc.StatusCode.FAILED_PRECONDITION
    for name, incarnation in (("of another life", "another"), ("of no life", "")):
        request = decode_request(name.replace(" ", "-"), incarnation)
        yield (
            f"decode: {name}",
            Case(method=DECODE, sent=[request], code=over, reason="REPLACED", to="decode-0"),
        )


def _rehearsals(decode: str) -> Iterator[tuple[str, Case]]:
    def case(name: str, field: str, **changes: Any) -> tuple[str, Case]:
        writer = pb.WorkerRef(address="127.0.0.1:1", incarnation="w", engine_port=1)
        fields: dict[str, Any] = {"attempt": attempt(name), "incarnation": decode, "writer": writer}
        request = pb.RehearseRequest(**(fields | {"most_pages": 1} | changes))
        sent = Case(method=REHEARSE, sent=[request], field=field, to="decode-0")
        return f"rehearse: {name}", sent

    yield case("no-attempt", "attempt.request_id", attempt=None)
    yield case("no-writer", "writer.address", writer=None)
    yield case("no-pages", "most_pages", most_pages=0)


def _reservation(name: str, **changes: Any) -> pb.PrefillRequest:
    fields: dict[str, Any] = {
        "attempt": attempt(name), "incarnation": "decode-life", "connector": "zmq",
        **_shard(),
        "num_pool_pages": 8, "lease_s": 5.0,
        "pages": [pb.PageRef(page_id=3, generation=1)],
        "fingerprint": [pb.FingerprintField(name="weights", value="w")],
    }  # fmt: skip
    return pb.PrefillRequest(reservation=pb.Reservation(**(fields | changes)))


def _shard(**changes: Any) -> dict[str, Any]:
    """The pool of a decode worker with one rank."""
    fields: dict[str, Any] = {
        "endpoint": "tcp://127.0.0.1:1",
        "end_head": 1,
        "end_group": 1,
        "page_bytes": 32,
    }
    return {"shards": [pb.ReceivingShard(**(fields | changes))]}


def _prefills(at: Facts, life: str) -> Iterator[tuple[str, Case]]:
    def start(name: str, **changes: Any) -> pb.PrefillRequest:
        fields: dict[str, Any] = {
            "attempt": attempt(name),
            "prompt_token_ids": PROMPT,
            "incarnation": life,
        }
        return pb.PrefillRequest(start=pb.PrefillStart(**(fields | changes)))

    def case(name: str, sent: Sequence[pb.PrefillRequest], field: str, **more: Any) -> Case:
        return Case(method=PREFILL, sent=sent, field=field, to="prefill-0", **more)

    yield "prefill: nothing", case("", [], "start")
    yield "prefill: no message", case("", [pb.PrefillRequest()], "start")
    yield "prefill: reservation first", case("", [_reservation("p0")], "start")
    no_id = start("p1", attempt=None)
    yield "prefill: no attempt", case("", [no_id], "attempt.request_id")
    yield "prefill: no prompt", case("", [start("p2", prompt_token_ids=[])], "prompt_token_ids")
    replaced = {"code": grpc.StatusCode.FAILED_PRECONDITION, "reason": "REPLACED"}
    yield "prefill: another life", case("", [start("p3", incarnation="x")], "", **replaced)
    foreign = start("p4", prompt_token_ids=[at.vocab_size])
    yield "prefill: foreign id", case("", [foreign, _reservation("p4")], "prompt")
    long = start("p5", prompt_token_ids=[5] * (at.max_model_len + 1))
    yield "prefill: long prompt", case("", [long, _reservation("p5")], "prompt")
    yield "prefill: no reservation", case("", [start("p6")], "reservation")
    yield "prefill: started twice", case("", [start("p7"), start("p7")], "reservation")
    reservations: dict[str, tuple[dict[str, Any], str]] = {
        "of another attempt": ({"attempt": attempt("x")}, "reservation.attempt"),
        "of no attempt": ({"attempt": None}, "attempt.request_id"),
        "a page outside the pool": ({"pages": [pb.PageRef(page_id=8)]}, "reservation"),
        "a page twice": ({"pages": [pb.PageRef(page_id=3)] * 2}, "reservation"),
        "pages of no bytes": (_shard(page_bytes=0), "reservation"),
        "huge pages": (_shard(page_bytes=2**60), "reservation"),
        "a huge pool": ({"num_pool_pages": 2**32 - 1}, "reservation"),
        "an address beyond memory": (_shard(pool_address=2**64 - 1), "reservation"),
        "no lease": ({"lease_s": 0.0}, "reservation"),
        "lease nan": ({"lease_s": math.nan}, "reservation"),
        "lease of a year": ({"lease_s": 3e7}, "reservation"),
        "no life": ({"incarnation": ""}, "reservation"),
        "no connector": ({"connector": ""}, "reservation"),
        "unknown memory": (_shard(memory_kind="TAPE"), "reservation"),
        "long metadata": (_shard(agent_metadata=bytes(2 << 20)), "reservation"),
        "a long name": (
            {"fingerprint": [pb.FingerprintField(name="x" * 200)]}, "reservation"
        ),
    }  # fmt: skip
    for number, (name, (changes, field)) in enumerate(reservations.items()):
        sent = [start(f"r{number}"), _reservation(f"r{number}", **changes)]
        yield f"prefill: reservation, {name}", case(name, sent, field)
    refused = {"code": grpc.StatusCode.FAILED_PRECONDITION, "reason": "REFUSED"}
    for name, changes in (("fingerprint", {}), ("connector", {"connector": "nixl"})):
        sent = [start(f"other-{name}"), _reservation(f"other-{name}", **changes)]
        yield f"prefill: reservation, another {name}", case(name, sent, "", **refused)


def _calls() -> Iterator[tuple[str, Case]]:
    for worker in ("prefill-0", "decode-0"):
        for name, seconds in (("negative", -1.0), ("nan", math.nan)):
            yield f"{worker}: drain, {name}", Case(
                method=f"{WORKER}/Drain", sent=[pb.DrainRequest(deadline_s=seconds)],
                field="deadline_s", to=worker,
            )  # fmt: skip
        for name, bad, field in (
            ("no attempt", None, "attempt.request_id"),
            ("long transfer", attempt("", transfer_id="a" * 129), "attempt.transfer_id"),
        ):
            yield f"{worker}: abort, {name}", Case(
                method=f"{WORKER}/Abort", sent=[pb.AbortRequest(attempt=bad)], field=field,
                to=worker,
            )  # fmt: skip
