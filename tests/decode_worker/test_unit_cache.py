"""KV that outlives its request in an engine that decodes: the same tokens, fewer computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from auditing import audit
from decoding.chats import FAMILIES, WAYS, Models, told
from decoding.device_rig import DeviceRig
from decoding.engines import INCARNATION, Rig, make_request
from decoding.source import SOURCE, Source
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.roster import Roster
from effuse.kvtransfer.pool import PageState
from effuse.kvtransfer.units import HeldUnits, Ids, UnitCache
from effuse.models.transformer import Transformer
from effuse.worker.messages import Abort, Reserved, StartDecode, WriterGone


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_a_cache_changes_no_token(models: Models, family: str, way: str) -> None:
    model = models(family)
    expected, off = told(model, way, caches=False, page_size=3)
    found, on = told(model, way, caches=True, page_size=3)
    assert found == expected
    load = on.engine.load()
    is_canvas = way in ("llada", "dream", "fast_dllm")
    assert (load.prefix_hits > 0) == (not is_canvas)
    saved = off.engine.counters.prompt_tokens - on.engine.counters.prompt_tokens
    assert saved > 0 or is_canvas
    assert off.engine.load().prefix_queries == 0


@pytest.mark.parametrize(
    ("family", "way"), [("sdar", "block_diffusion"), ("sdar", "d2f"), ("dream", "d2f")]
)
def test_nor_does_it_with_few_pages(models: Models, family: str, way: str) -> None:
    """Some requests are preempted, and go on from their own units or from nothing."""
    pages: dict[str, Any] = {"num_pages": 56, "page_size": 4, "max_num_seqs": 8, "budget": 256}
    long: dict[str, Any] = {"most": 56, "seed": 0}
    model = models(family)
    expected, _ = told(model, way, caches=False, **long)
    for kind in (Rig, DeviceRig):
        found, rig = told(model, way, caches=True, kind=kind, **long, **pages)
        assert found == expected
        assert rig.engine.counters.preemptions > 0
        assert rig.cache.num_evicted > 0


def computed(rig: Rig, *requests: StartDecode) -> int:
    """Runs these requests together; how many tokens of prompts were computed."""
    before = rig.engine.counters.prompt_tokens
    for request in requests:
        rig.start(request)
    rig.run()
    return rig.engine.counters.prompt_tokens - before


def test_the_next_turn_of_a_chat_goes_on_from_prompt_and_answer(
    models: Models,
) -> None:
    rig = Rig(models("sdar"))
    first = make_request("1", range(20, 40), max_tokens=24, stop_token_ids=())
    assert computed(rig, first) == 20
    answer = rig.answers["transfer-1"].token_ids
    # Of the answer's six blocks the last one's KV was never stored.
    second = make_request("2", [*range(20, 40), *answer, *range(60, 69)], stop_token_ids=())
    assert computed(rig, second) == 4 + 8
    assert computed(rig, msgspec.structs.replace(first, attempt=second.attempt)) == 0


def test_of_prompts_with_a_common_beginning_only_the_rest_is_computed(
    models: Models,
) -> None:
    rig = Rig(models("sdar"), num_pages=1024)
    prompts = [[*(20 + at % 60 for at in range(56)), *range(20 + n, 28 + n)] for n in range(16)]
    requests = [make_request(str(n), prompt, max_tokens=8) for n, prompt in enumerate(prompts)]
    assert computed(rig, requests[0]) == 64
    assert computed(rig, *requests[1:]) == 15 * 8


def test_an_equal_bidirectional_prompt_is_not_computed_again(
    models: Models,
) -> None:
    """13 tokens: the answer begins in the prompt's last page."""
    for family in ("dream", "llada"):
        rig = Rig(models(family))
        requests = [make_request(str(n), range(20, 33), max_tokens=9) for n in range(3)]
        assert computed(rig, requests[0]) == 13
        assert computed(rig, requests[1]) == 0
        longer = msgspec.structs.replace(requests[2], prompt_token_ids=tuple(range(20, 34)))
        assert computed(rig, longer) == 14
        told = [rig.answers[f"transfer-{n}"].token_ids for n in range(2)]
        assert told[0] == told[1]


def test_texts_of_another_salt_share_nothing(models: Models) -> None:
    rig = Rig(models("sdar"))
    for name, salt, expected in (("a", "", 16), ("b", "acme", 16), ("c", "acme", 0)):
        request = make_request(name, range(20, 36), max_tokens=4)
        assert computed(rig, msgspec.structs.replace(request, cache_salt=salt)) == expected


def test_answers_of_another_salt_are_no_siblings(models: Models) -> None:
    rig = Rig(models("sdar"))
    asked = [make_request(name, range(20, 36), group="g") for name in "abc"]
    assert computed(rig, msgspec.structs.replace(asked[0], cache_salt="acme"), *asked[1:]) == 32
    assert rig.pool.num_free == rig.pool.num_pages


def test_nothing_stays_of_a_request_whose_forward_was_not_finite(
    models: Models,
) -> None:
    rig = Rig(models("sdar"))
    failing = rig.start(make_request("a", range(20, 36), max_tokens=8))
    rig.step()
    rig.memory.tensor.fill_(float("nan"))
    rig.run()
    assert failing.failed.code == "INTERNAL"
    assert rig.cache.num_cached == 0 and rig.pool.count(PageState.FREE) == rig.pool.num_pages
    rig.memory.tensor.zero_()
    assert computed(rig, make_request("b", range(20, 36), max_tokens=8)) == 16


def by_the_beginning(cache: UnitCache, one: HeldUnits, tokens: Ids, num_tokens: int) -> None:
    size = cache.unit_size
    for end in range(size * (len(one.keys) + 1), num_tokens + 1, size):
        one.keys.append(repr((list(tokens[:size]), end)).encode())


def before_it_is_stored(roster: Roster, request: DecodeRequest) -> None:
    sequence, cache = request.sequence, roster._cache
    end = min(sequence.final_len, len(request.pages) * roster._limits.page_size)
    cache.extend(request.units, sequence.token_ids, end)
    cache.add(request.units, request.pages, end)


@pytest.mark.parametrize("bug", ["wrong key", "kept before it is stored"])
def test_planted_bugs_change_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    asked = [(seed, told(models("sdar"), "d2f", caches=False, seed=seed)[0]) for seed in range(4)]
    for is_planted in (False, True):
        if is_planted and bug == "wrong key":
            monkeypatch.setattr(UnitCache, "extend", by_the_beginning)
        elif is_planted:
            monkeypatch.setattr(Roster, "keep", before_it_is_stored)
        differs = False
        for seed, expected in asked:
            try:
                on = told(models("sdar"), "d2f", caches=True, seed=seed, page_size=8)[0]
            except AssertionError:  # a resumed answer went on otherwise
                on = []
            differs |= on != expected
        assert differs == is_planted


class Pushed:
    """An engine whose prompts come from a writer."""

    def __init__(self, model: Transformer, *, is_two_sided: bool, **limits: Any) -> None:
        self.rig = Rig(model, **limits)
        hub = Hub(is_two_sided=is_two_sided)
        self.target = LoopbackConnector(
            hub, self.rig.memory, INCARNATION, self.rig.fingerprint, self.rig.clock
        )
        self.target.start()
        self.rig.connect(self.target)
        self.source = Source(model, hub, self.rig.clock, page_size=self.rig.limits.page_size)

    def ask(self, name: str, prompt: Sequence[int], **more: Any) -> tuple[tuple[int, ...], int]:
        """The answer, and the number of pages that were handed over for it."""
        request = make_request(name, prompt, writer=SOURCE, **more)
        answer = self.rig.start(request)
        self.rig.step()
        reserved = answer.events[0]
        assert isinstance(reserved, Reserved)
        self.source.push(request, reserved.reservation)
        self.rig.run()
        return answer.token_ids, len(reserved.reservation.pages)

    def close(self) -> None:
        self.target.close()
        self.source.connector.close()


@pytest.mark.parametrize("is_two_sided", [False, True], ids=["one-sided", "two-sided"])
@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2", "dream", "llada"])
def test_only_unknown_pages_are_handed_over(
    models: Models, family: str, is_two_sided: bool
) -> None:
    model, way = models(family), FAMILIES[family][0]
    on = Pushed(model, is_two_sided=is_two_sided, page_size=8)
    off = Pushed(model, is_two_sided=is_two_sided, page_size=8, caches=False)
    prompt, moved = list(range(20, 45)), [0, 0]
    is_causal = on.rig.cache.is_causal
    for turn in range(4):
        for again in range(2):
            asked: dict[str, Any] = {"max_tokens": 19, "algorithm": way, "stop_token_ids": ()}
            found = on.ask(f"{turn}-{again}", prompt, **asked)
            expected = off.ask(f"{turn}-{again}", prompt, **asked)
            assert found[0] == expected[0]
            moved[0] += found[1]
            moved[1] += expected[1]
            most = (1 if again else 4) if is_causal else (0 if again else expected[1])
            assert found[1] <= most
            audit(on.rig.engine)
        prompt += [*found[0], *range(60, 66)]
    assert moved[0] <= moved[1] // 2
    load = on.rig.engine.load()
    assert load.kv_bytes == moved[0] * on.rig.layout.page_bytes
    assert load.kv_bytes + load.kv_bytes_held == moved[1] * on.rig.layout.page_bytes
    on.close()
    off.close()


def test_a_failed_handoff_leaves_known_pages_as_they_were(
    models: Models,
) -> None:
    """Only pages that the writer knows go into quarantine."""
    for family in ("sdar", "dream"):
        pushed, way = Pushed(models(family), is_two_sided=False), FAMILIES[family][0]
        pushed.ask("first", range(20, 45), algorithm=way)
        cached = pushed.rig.cache.num_cached
        prompt = range(20, 57) if family == "sdar" else range(20, 45)
        request = make_request("lost", prompt, writer=SOURCE, algorithm=way)
        pushed.rig.start(request)
        pushed.rig.step()
        pushed.rig.engine.handle(Abort(attempt=request.attempt))
        pushed.rig.step()
        quarantined = pushed.rig.engine.load().quarantined_pages
        assert quarantined == (3 if family == "sdar" else 0)
        assert pushed.rig.cache.num_cached == cached
        gone = WriterGone(transfer_id="transfer-lost", has_drained=True)
        pushed.rig.engine.handle(gone)
        pushed.rig.run()
        assert pushed.rig.pool.num_free == pushed.rig.pool.num_pages
        _, moved = pushed.ask("again", prompt, algorithm=way)
        assert moved == quarantined
        pushed.close()
