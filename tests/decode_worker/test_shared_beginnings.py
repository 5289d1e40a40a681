"""Answers to one prompt read its pages together in the device's steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import load_tiny, make_request, oracle_settings
from oracle.decode import decode

from effuse.config.decoding import Sampling
from effuse.decode_worker import device_buckets
from effuse.models.transformer import Transformer
from effuse.worker.messages import Abort, StartDecode

PROMPT = tuple(range(20, 33))


@pytest.fixture(autouse=True)
def short_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_buckets, "LEAST_SAVED", 1)
    monkeypatch.setattr(device_buckets, "LEAST_SAVED_EACH", 0)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sdar") / "model", "sdar", seed=3)


def answer(number: int) -> StartDecode:
    return make_request(
        str(number),
        PROMPT,
        max_tokens=24,
        group="g",
        sampling=Sampling(temperature=1.0, seed=7, answer_index=number),
    )


def run(directory: Path, count: int, *, abort: int | None = None) -> DeviceRig:
    """Runs so many answers; each but an aborted one is the oracle's."""
    rig = DeviceRig(load_tiny(directory), page_size=3)
    requests = [answer(number) for number in range(count)]
    for request in requests:
        rig.start(request)
    if abort is not None:
        while rig.engine.counters.steps_sharing < 2:
            rig.step()
        rig.engine.handle(Abort(attempt=requests.pop(abort).attempt))
    rig.run()
    for request in requests:
        told = rig.answers[request.attempt.transfer_id].token_ids
        expected = decode(directory, request.prompt_token_ids, oracle_settings(request))
        assert told == expected.token_ids
    assert rig.pool.num_free == rig.pool.num_pages
    return rig


@pytest.mark.parametrize("architecture", ["sdar", "dream", "llada"])
def test_answers_are_those_of_single_requests(architecture: Architecture, tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=5)
    assert run(directory, 4).engine.counters.steps_sharing > 5


def test_an_answer_that_is_left_reads_by_itself(sdar: Path) -> None:
    counters = run(sdar, 2, abort=1).engine.counters
    assert counters.steps_sharing < 6 < counters.steps


def test_a_model_whose_rows_round_by_position_reads_nothing_together(
    sdar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(sdar)
    invariant = Transformer(model.config, model.weights, batch_invariant=True)
    assert model.can_share and not invariant.can_share
    never = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(Transformer, "can_share", never, raising=False)
    assert run(sdar, 4).engine.counters.steps_sharing == 0
