"""Sixteen concurrent requests of different shapes give the oracle's tokens, preempted or not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from checkpoints import ARCHITECTURES, Architecture, write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, oracle_settings, random_requests
from expert_checkpoints import ExpertFamily, write_expert_checkpoint
from oracle.decode import decode_with
from oracle.forward import RawModel, load_raw
from oracle.settings import Occurrences, OracleResult

from effuse.config.decoding import Stopping
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

ALGORITHMS = ("d2f", "block_diffusion")


class Twin:
    """One checkpoint, as loaded by the engine and by the oracle."""

    def __init__(self, directory: Path) -> None:
        self.model: Transformer = load_tiny(directory)
        self.raw: RawModel = load_raw(directory)
        self._known: dict[StartDecode, OracleResult] = {}

    def expected(self, request: StartDecode) -> OracleResult:
        if request not in self._known:
            self._known[request] = decode_with(
                self.raw, request.prompt_token_ids, oracle_settings(request)
            )
        return self._known[request]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    architecture: Architecture = request.param
    directory = tmp_path_factory.mktemp(architecture)
    return Twin(write_tiny_checkpoint(directory / "model", architecture, seed=3))


def check(twin: Twin, rig: Rig, requests: list[StartDecode]) -> None:
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    for request in requests:
        expected = twin.expected(request)
        answer = rig.answers[request.attempt.transfer_id]
        assert answer.token_ids == expected.token_ids, request
        assert answer.finished.stopped == (expected.finish == "stop")
        assert answer.finished.num_tokens == len(expected.token_ids)
        assert answer.finished.forward_passes == expected.forwards
    assert rig.pool.num_free == rig.pool.num_pages


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_are_the_oracles(twin: Twin, algorithm: str, sampled: bool) -> None:
    rig = Rig(twin.model)
    check(twin, rig, random_requests(16, algorithm, block_size=4, sampled=sampled))
    assert rig.engine.counters.preemptions == 0


@pytest.mark.parametrize(
    ("family", "algorithm"), [("sdar_moe", "d2f"), ("llada_moe", "block_diffusion")]
)
def test_answers_of_experts_are_the_oracles(
    tmp_path: Path, family: ExpertFamily, algorithm: str
) -> None:
    """The pools are short, so that some requests are preempted. LLaDA2.0 is in `test_llada2`.

    `test_answers_survive_preemption` has both algorithms for each family without experts.
    """
    twin = Twin(write_expert_checkpoint(tmp_path, family, seed=4))
    requests = [
        msgspec.structs.replace(request, stopping=Stopping(max_tokens=24))
        for request in random_requests(16, algorithm, block_size=4, sampled=True)
    ]
    rig = Rig(twin.model, num_pages=20, page_size=3, budget=48)
    check(twin, rig, requests)
    assert rig.engine.counters.preemptions >= 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_survive_preemption(twin: Twin, algorithm: str) -> None:
    requests = [
        msgspec.structs.replace(request, stopping=Stopping(max_tokens=24))
        for request in random_requests(16, algorithm, block_size=4, sampled=True)
    ]
    rig = Rig(twin.model, num_pages=20, page_size=3, budget=48)
    check(twin, rig, requests)
    finished = [answer.finished.preemptions for answer in rig.answers.values()]
    assert sum(finished) == rig.engine.counters.preemptions >= 3
    assert sum(count > 0 for count in finished) >= 2


def test_the_rare_cases_are_met(twin: Twin) -> None:
    rig = Rig(twin.model)
    requests = [
        request
        for seed in range(1, 6)
        for request in random_requests(16, "d2f", block_size=4, sampled=True, seed=seed)
    ]
    check(twin, rig, requests)
    met = Occurrences()
    for request in requests:
        met.add(twin.expected(request).occurred)
    assert met.semi_active_writes and met.steps_settling_several and met.stops_behind_unfinished
    # Elsewhere blocks begin where the prompt ends.
    has_tails = twin.model.config.architecture == "sdar"
    assert (met.ragged_tails > 0) == (met.prompts_shorter_than_block > 0) == has_tails
