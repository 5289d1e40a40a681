"""Penalties, biases, min-p and a least length in a whole engine: the oracle's tokens, on a device
as on the host, and again from every commit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoints import ARCHITECTURES, EOS_TOKEN_ID, Architecture, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, make_request, oracle_settings, random_requests
from oracle.decode import decode_with
from oracle.forward import RawModel, load_raw

from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker.request import edits_for
from effuse.decode_worker.sequence import Sequence
from effuse.models.part import Forward, Part, PartResult
from effuse.models.transformer import Transformer
from effuse.worker.messages import Committed, Resume, StartDecode

ALGORITHMS = ("d2f", "block_diffusion")
STOPS = frozenset({30, EOS_TOKEN_ID})  # of which a bias makes one likely
Twin = tuple[Transformer, RawModel]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    architecture: Architecture = request.param
    path = write_tiny_checkpoint(tmp_path_factory.mktemp(architecture) / "m", architecture, seed=3)
    return load_tiny(path), load_raw(path)


def requests_for(algorithm: str, count: int = 12) -> list[StartDecode]:
    """Every request changes something, and most put off their end."""
    draw = random.Random(algorithm)
    found = []
    for request in random_requests(count, algorithm, block_size=4, sampled=True, seed=5):
        most = request.stopping.max_tokens
        sampling = msgspec.structs.replace(
            request.sampling,
            min_p=draw.choice((0.0, 0.25, 1.0)),
            presence_penalty=draw.choice((0.0, 0.5, -0.25)),
            frequency_penalty=draw.choice((0.0, 0.75)),
            repetition_penalty=draw.choice((1.0, 1.5, 0.5)),
            logit_bias=((11, 1.5), (12, -100.0), (30, 20.0)),
        )
        least = draw.choice((0, most // 2, most))
        stopping = Stopping(max_tokens=most, stop_token_ids=STOPS, min_tokens=least)
        found.append(msgspec.structs.replace(request, sampling=sampling, stopping=stopping))
    return found


def run(rig: Rig, requests: list[StartDecode]) -> None:
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    assert rig.pool.num_free == rig.pool.num_pages


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_are_the_oracles(twin: Twin, algorithm: str) -> None:
    model, raw = twin
    rig, requests, seen = Rig(model), requests_for(algorithm), set[str]()
    run(rig, requests)
    for request in requests:
        expected = decode_with(raw, request.prompt_token_ids, oracle_settings(request))
        answer = rig.answers[request.attempt.transfer_id]
        assert answer.token_ids == expected.token_ids, request
        assert answer.finished.stopped == (expected.finish == "stop")
        assert answer.finished.num_tokens >= request.stopping.min_tokens
        seen.add(expected.finish)
    assert seen == {"stop", "length"}


@pytest.mark.parametrize("least", [0, 6])
def test_a_device_takes_over_once_any_token_may_end_the_answer(twin: Twin, least: int) -> None:
    """Before that the host feeds the steps; the tokens are the same, drafts and counts too."""
    requests = [
        msgspec.structs.replace(
            request,
            drafts=True,
            stopping=msgspec.structs.replace(
                request.stopping, min_tokens=min(least, request.stopping.max_tokens)
            ),
        )
        for request in random_requests(8, "d2f", block_size=4, sampled=True, seed=2)
    ]
    host, device = Rig(twin[0]), DeviceRig(twin[0])
    run(host, requests)
    run(device, requests)
    for name, answer in host.answers.items():
        assert device.answers[name].said == answer.said, name
    assert device.stepper._num_launched > 0


def test_an_answer_goes_on_from_every_commit(twin: Twin) -> None:
    model, _ = twin
    (request,) = [one for one in requests_for("d2f") if one.stopping.max_tokens > 20][:1]
    rig = Rig(model)
    run(rig, [request])
    whole = rig.answers[request.attempt.transfer_id]
    resumed = 0
    for commit in whole.commits:
        done = whole.token_ids[: commit.token_offset + len(commit.token_ids)]
        if not done or not commit.frontier:
            continue
        again = _resumed(request, done, commit)
        rig = Rig(model)
        run(rig, [again])
        rest = rig.answers[request.attempt.transfer_id]
        found = tuple(token for one in rest.commits for token in one.token_ids)
        assert done + found == whole.token_ids
        resumed += 1
    assert resumed >= 2


def _resumed(request: StartDecode, done: tuple[int, ...], commit: Committed) -> StartDecode:
    resume = Resume(committed_token_ids=done, frontier=commit.frontier)
    return msgspec.structs.replace(request, resume=resume)


class Recording:
    """A forward that keeps the parts it has run."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.parts: list[Part] = []

    def run(self, parts: Iterable[Part]) -> list[PartResult]:
        self.parts += parts
        return self.forward.run(list(parts))


@pytest.mark.parametrize("algorithm", ["block_diffusion", "llada"])
def test_what_final_text_changes_is_worked_out_once_for_all_steps_of_a_block(
    tmp_path: Path, algorithm: str
) -> None:
    """It takes all of prompt and answer, and each step waits for it."""
    rig = Rig(load_tiny(write_tiny_checkpoint(tmp_path / "model", "llada", seed=3)))
    rig.forward = recording = Recording(rig.forward)
    rig.connect(None)
    request = make_request(
        "a", range(20, 28), max_tokens=12, stop_token_ids=(), algorithm=algorithm,
        confidence_threshold=1.0, block_length=4, sampling=Sampling(repetition_penalty=1.5),
    )  # fmt: skip
    run(rig, [request])
    edits = [part.edits for part in recording.parts if part.edits is not None]
    assert len(edits) == 12
    assert len({id(one.edits) for one in edits}) == 3


def sequence_of(answer: list[int], min_tokens: int = 0) -> Sequence:
    """Two blocks of 4 behind a prompt of 4 are final."""
    stopping = Stopping(max_tokens=16, stop_token_ids=frozenset({2, 9}), min_tokens=min_tokens)
    sequence = Sequence(
        [5, 6, 5, 7], origin=4, block_size=4, mask_token_id=1, stopping=stopping
    )  # fmt: skip
    return sequence.resume(answer, ())


def test_only_final_text_is_penalised_and_prompts_only_for_repetition() -> None:
    sequence = sequence_of([7, 8, 8, 8, 3, 3, 8, 4])
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 1.0),))
    candidates = np.arange(12, 16)
    found = edits_for(sampling, sequence, candidates)
    assert found is not None
    edits = dict(zip(found.edits.token_ids.tolist(), found.edits.added.tolist(), strict=True))
    assert edits == {3: 0.0, 4: -0.75, 7: -0.75, 8: -1.5}
    assert (found.edits.penalties == 1).all()
    repeated = edits_for(Sampling(repetition_penalty=1.5), sequence, candidates)
    assert repeated is not None
    assert repeated.edits.token_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert (repeated.edits.penalties == 1.5).all() and not repeated.edits.added.any()


def test_ids_that_end_an_answer_are_barred_up_to_its_least_length() -> None:
    sequence = sequence_of([7, 8, 8, 8], min_tokens=6)
    bias = Sampling(logit_bias=((2, 9.0), (3, 1.0)))
    found = edits_for(bias, sequence, np.arange(8, 12))
    assert found is not None and found.early_end == 10
    early = dict(zip(found.early.token_ids.tolist(), found.early.added.tolist(), strict=True))
    assert early == {2: -np.inf, 9: -np.inf, 3: 1.0}
    assert found.edits.token_ids.tolist() == [2, 3]
    assert edits_for(Sampling(), sequence, np.arange(10, 12)) is None
    assert edits_for(Sampling(), sequence_of([7, 8, 8, 8]), np.arange(8, 12)) is None


def test_a_bias_of_no_id_of_the_model_is_refused(twin: Twin) -> None:
    rig = Rig(twin[0])
    sampling = Sampling(logit_bias=((10**6, 1.0),))
    rig.engine.handle(make_request("a", [20, 21], sampling=sampling))
    rig.run()
    assert "logit_bias must lie in" in rig.answers["transfer-a"].failed.message


@pytest.mark.parametrize("algorithm", ["llada", "dream", "fast_dllm"])
def test_canvases_are_edited_too(tmp_path: Path, algorithm: str) -> None:
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "llada", seed=3))
    wanted = Sampling(logit_bias=((40, 100.0),))
    stopping = Stopping(max_tokens=8, stop_token_ids=frozenset({40}), min_tokens=5)
    free = make_request("free", [20, 21], max_tokens=8, sampling=wanted, algorithm=algorithm)
    ends = msgspec.structs.replace(free, attempt=make_request("ends", [20]).attempt)
    ends = msgspec.structs.replace(ends, stopping=stopping)
    rig = Rig(model)
    run(rig, [free, ends])
    assert rig.answers["transfer-free"].token_ids == (40,) * 8
    assert 40 not in rig.answers["transfer-ends"].token_ids
    assert rig.answers["transfer-ends"].commits[-1].end_token_id == 40
    assert rig.answers["transfer-ends"].finished.num_tokens == 5


def test_a_step_that_proposes_nothing_spoils_no_other(tmp_path: Path) -> None:
    """The random choice of a canvas with changed logits is often empty, next to a request without
    changes.
    """
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "dream", seed=3))
    changed, plain = Sampling(presence_penalty=1.0), Sampling()
    requests = [
        make_request("lot", [20], max_tokens=4, sampling=changed, algorithm="dream", steps=32),
        make_request("other", [20, 21], max_tokens=32, sampling=plain, stop_token_ids=()),
    ]
    rig = Rig(model)
    run(rig, requests)
    for request in requests:
        alone, name = Rig(model), request.attempt.transfer_id
        run(alone, [request])
        assert rig.answers[name].token_ids == alone.answers[name].token_ids
        assert rig.answers[name].finished
