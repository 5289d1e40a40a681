"""Log-probabilities in a whole engine: those of the step that wrote each token, by the oracle's
steps, again from every commit, and on a device as on the host."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from checkpoints import ARCHITECTURES, Architecture, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Answer, Rig, load_tiny, make_request, oracle_settings, random_requests
from oracle.decode import decode_with
from oracle.forward import RawModel, load_raw

from effuse.models.transformer import Transformer
from effuse.worker.messages import Resume, StartDecode, TokenLogprobs

Twin = tuple[Transformer, RawModel]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    architecture: Architecture = request.param
    path = write_tiny_checkpoint(tmp_path_factory.mktemp(architecture) / "m", architecture, seed=3)
    return load_tiny(path), load_raw(path)


def asked(algorithm: str, count: int, num_logprobs: int) -> list[StartDecode]:
    return [
        msgspec.structs.replace(request, num_logprobs=num_logprobs)
        for request in random_requests(count, algorithm, block_size=4)
    ]


def run(rig: Rig, requests: list[StartDecode]) -> None:
    for request in requests:
        rig.engine.handle(request)
    rig.run()


def told(answer: Answer) -> list[TokenLogprobs]:
    for commit in answer.commits:
        assert len(commit.logprobs) == len(commit.token_ids)
    return [one for commit in answer.commits for one in commit.logprobs]


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
def test_they_are_those_of_the_step_that_wrote_the_token(twin: Twin, algorithm: str) -> None:
    model, raw = twin
    rig, requests = Rig(model), asked(algorithm, 6, 3)
    run(rig, requests)
    for request in requests:
        expected = decode_with(raw, request.prompt_token_ids, oracle_settings(request))
        written = {
            position: step.candidates[position].confidence  # greedy, by the unchanged model
            for step in expected.steps
            for position in step.writes
        }
        answer = rig.answers[request.attempt.transfer_id]
        assert answer.token_ids == expected.token_ids
        for index, one in enumerate(told(answer)):
            confidence = written[len(request.prompt_token_ids) + index]
            assert one.logprob == pytest.approx(math.log(confidence), rel=1e-4, abs=1e-5)
            assert one.top_token_ids[0] == answer.token_ids[index]
            assert one.top_logprobs[0] == pytest.approx(one.logprob)
            assert sorted(one.top_logprobs, reverse=True) == list(one.top_logprobs)
            assert len(one.top_token_ids) == 3


def test_a_token_that_no_edit_replaces_keeps_its_own(twin: Twin) -> None:
    requests = []
    for request in asked("block_diffusion", 6, 1):
        settings = msgspec.structs.replace(
            request.settings, editing_threshold=0.9, max_post_steps=4
        )
        requests.append(msgspec.structs.replace(request, settings=settings))
    rig = Rig(twin[0])
    run(rig, requests)
    for request in requests:
        answer = rig.answers[request.attempt.transfer_id]
        assert tuple(one.top_token_ids[0] for one in told(answer)) == answer.token_ids


def test_they_are_the_same_on_a_device_and_from_every_commit(twin: Twin) -> None:
    """A resumed attempt knows those of tokens that another one wrote into its frontier."""
    model, _ = twin
    request = max(asked("d2f", 8, 2), key=lambda one: one.stopping.max_tokens)
    host, device = Rig(model), DeviceRig(model)
    run(host, [request])
    run(device, [request])
    whole = host.answers[request.attempt.transfer_id]
    assert device.answers[request.attempt.transfer_id].said == whole.said
    resumed = 0
    for commit in whole.commits:
        done = whole.token_ids[: commit.token_offset + len(commit.token_ids)]
        if not done or not commit.frontier:
            continue
        resume = Resume(committed_token_ids=done, frontier=commit.frontier)
        rig = Rig(model)
        run(rig, [msgspec.structs.replace(request, resume=resume)])
        rest = told(rig.answers[request.attempt.transfer_id])
        assert told(whole)[: len(done)] + rest == told(whole)
        bare = tuple(msgspec.structs.replace(block, logprobs=()) for block in commit.frontier)
        if any(one for block in commit.frontier for one in block.logprobs):
            resumed += 1
            resume = Resume(committed_token_ids=done, frontier=bare)
            rig = Rig(model)
            run(rig, [msgspec.structs.replace(request, resume=resume)])
            failed = rig.answers[request.attempt.transfer_id].failed
            assert "has no log-probabilities" in failed.message
    assert resumed


@pytest.mark.parametrize("algorithm", ["llada", "dream", "fast_dllm"])
def test_canvases_tell_them_too(tmp_path: Path, algorithm: str) -> None:
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "llada", seed=3))
    request = make_request("a", [20, 21], max_tokens=8, stop_token_ids=(), algorithm=algorithm)
    rig = Rig(model)
    run(rig, [msgspec.structs.replace(request, num_logprobs=0)])
    answer = rig.answers["transfer-a"]
    assert len(told(answer)) == len(answer.token_ids) == 8
    assert all(one.logprob < 0 and not one.top_token_ids for one in told(answer))


def test_a_canvas_goes_on_though_nothing_is_written_behind_its_end(tmp_path: Path) -> None:
    """The last block of 4 holds two tokens of the answer, and log-probabilities of no more."""
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "llada", seed=3))
    request = make_request(
        "a", [20, 21], max_tokens=10, stop_token_ids=(), algorithm="llada", block_length=4
    )
    request = msgspec.structs.replace(request, num_logprobs=1)
    rig, later = Rig(model), Rig(model)
    run(rig, [request])
    whole = rig.answers["transfer-a"]
    first = whole.commits[0]
    resume = Resume(committed_token_ids=first.token_ids, frontier=first.frontier)
    run(later, [msgspec.structs.replace(request, resume=resume)])
    assert list(first.logprobs) + told(later.answers["transfer-a"]) == told(whole)
