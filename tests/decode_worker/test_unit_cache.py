"""KV that outlives its request in an engine that decodes: the same tokens, fewer computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from auditing import audit
from checkpoints import EOS_TOKEN_ID, Architecture, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import INCARNATION, Rig, load_tiny, make_request
from decoding.source import SOURCE, Source
from expert_checkpoints import ExpertFamily, write_expert_checkpoint
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.config.decoding import Sampling
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.roster import Roster
from effuse.kvtransfer.pool import PageState
from effuse.kvtransfer.units import HeldUnits, Ids, UnitCache
from effuse.models.transformer import Transformer
from effuse.worker.messages import Abort, Reserved, Resume, StartDecode, WriterGone

BLOCK = 4
CAUSAL = ("sdar", "stable_diffcoder", "fast_dllm_v2", "sdar_moe", "llada2_moe")
FAMILIES: dict[str, tuple[str, ...]] = {
    "sdar": ("block_diffusion", "d2f"),
    "stable_diffcoder": ("block_diffusion",),
    "fast_dllm_v2": ("fast_dllm_v2",),
    "dream": ("d2f", "block_diffusion", "dream", "fast_dllm"),
    "llada": ("d2f", "block_diffusion", "llada", "fast_dllm"),
    "sdar_moe": ("block_diffusion",),
    "llada_moe": ("d2f",),
    "llada2_moe": ("block_diffusion", "edits"),
}
WAYS = [(family, way) for family, ways in FAMILIES.items() for way in ways]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Transformer]:
    known: dict[str, Transformer] = {}

    def model_of(family: str) -> Transformer:
        if family not in known:
            path = tmp_path_factory.mktemp(family) / "model"
            if family in ("sdar_moe", "llada_moe", "llada2_moe"):
                experts: ExpertFamily = family  # type: ignore[assignment]
                write_expert_checkpoint(path, experts, seed=4)
            else:
                architecture: Architecture = family  # type: ignore[assignment]
                write_tiny_checkpoint(path, architecture, seed=3, block_size=BLOCK)
            known[family] = load_tiny(path)
        return known[family]

    return model_of


def settings_of(way: str) -> dict[str, Any]:
    if way == "edits":
        edits = {"confidence_threshold": 0.6, "editing_threshold": 0.5, "max_post_steps": 4}
        return {"algorithm": "block_diffusion", **edits}
    if way in ("llada", "dream", "fast_dllm"):
        cache = {"cache": "prefix"} if way == "fast_dllm" else {}
        return {"algorithm": way, "block_length": 8, "steps": 0, **cache}
    return {"algorithm": way}


class Chats:
    """Chats of several turns, each of which begins with all the tokens before it; some answers are
    asked for again, twice at once, or resumed, and some are abandoned.
    """

    def __init__(self, rig: Rig, way: str, seed: int, *, sampled: bool, most: int = 24) -> None:
        self.rig, self.way, self.sampled, self.most = rig, way, sampled, most
        self.draw = random.Random(f"{seed}/{way}")
        self.asked: list[StartDecode] = []

    def ids(self, count: int) -> list[int]:
        return [self.draw.randrange(20, 90) for _ in range(count)]

    def request(self, prompt: Sequence[int], index: int = 0, group: str = "") -> StartDecode:
        temperature = 0.8 if self.sampled else 0.0
        request = make_request(
            str(len(self.asked)),
            prompt,
            max_tokens=self.draw.randint(1, self.most),
            sampling=Sampling(temperature=temperature, seed=len(prompt), answer_index=index),
            group=group,
            **settings_of(self.way),
        )
        self.asked.append(request)
        return request

    def run(self, num_chats: int, num_turns: int) -> list[tuple[int, ...]]:
        """The tokens of all answers that were not abandoned, in the order of the requests."""
        common = self.ids(self.draw.randint(8, 24))
        chats = [[*common, *self.ids(self.draw.randint(1, 12))] for _ in range(num_chats)]
        found: list[tuple[int, ...]] = []
        for _ in range(num_turns):
            turn = [self.turn(chat) for chat in chats]
            for _ in range(2):
                self.rig.step()
            self.abandon()
            self.rig.run()
            for chat, requests in zip(chats, turn, strict=True):
                answers = [self.rig.answers[one.attempt.transfer_id] for one in requests]
                found += [answer.token_ids for answer in answers]
                chat += [*found[-1], EOS_TOKEN_ID, *self.ids(self.draw.randint(1, 12))]
            self.resume(turn[0][0])
            found.append(self.regenerate(turn[1][0].prompt_token_ids))
        return found

    def turn(self, prompt: Sequence[int]) -> list[StartDecode]:
        kind = self.draw.choice(("one", "one", "again", "two"))
        group = f"g{len(self.asked)}" if kind == "two" else ""
        requests = [self.request(prompt, index, group) for index in range(1 + (kind != "one"))]
        for request in requests:
            self.rig.start(request)
        return requests

    def abandon(self) -> None:
        one = self.request(self.asked[-1].prompt_token_ids)
        self.rig.start(one)
        self.rig.step()
        self.rig.engine.handle(Abort(attempt=one.attempt, reason="test"))
        self.rig.collect()

    def regenerate(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Another answer to a prompt whose first one has ended."""
        answer = self.rig.start(self.request(prompt, index=5))
        self.rig.run()
        return answer.token_ids

    def resume(self, request: StartDecode) -> None:
        """The rest of an answer from a commit of it on is the same again."""
        whole = self.rig.answers[request.attempt.transfer_id]
        commits = [one for one in whole.commits if one.frontier]
        if not commits or request.settings.is_canvas:
            return
        commit = self.draw.choice(commits)
        before = whole.token_ids[: commit.token_offset + len(commit.token_ids)]
        attempt = msgspec.structs.replace(
            request.attempt, transfer_id=f"resumed-{len(self.asked)}", attempt=2
        )
        resume = Resume(committed_token_ids=before, frontier=commit.frontier)
        later = self.rig.start(msgspec.structs.replace(request, attempt=attempt, resume=resume))
        self.rig.run()
        rest = tuple(token for one in later.commits for token in one.token_ids)
        assert before + rest == whole.token_ids


def told(
    model: Transformer,
    way: str,
    *,
    caches: bool,
    seed: int = 1,
    sampled: bool = False,
    kind: type[Rig] = Rig,
    most: int = 24,
    **limits: int,
) -> tuple[list[tuple[int, ...]], Rig]:
    rig = kind(model, caches=caches, **limits)  # type: ignore[arg-type]
    found = Chats(rig, way, seed, sampled=sampled, most=most).run(3, 3)
    audit(rig.engine)
    assert rig.pool.num_free == rig.pool.num_pages
    return found, rig


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "way"), WAYS)
def test_a_cache_changes_no_token(
    models: Callable[[str], Transformer], family: str, way: str, sampled: bool
) -> None:
    model = models(family)
    expected, off = told(model, way, caches=False, sampled=sampled, page_size=3)
    found, on = told(model, way, caches=True, sampled=sampled, page_size=3)
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
def test_nor_does_it_with_few_pages(
    models: Callable[[str], Transformer], family: str, way: str
) -> None:
    """Some requests are preempted, and go on from their own units or from nothing."""
    pages: dict[str, Any] = {"num_pages": 56, "page_size": 4, "max_num_seqs": 8, "budget": 256}
    long: dict[str, Any] = {"sampled": True, "most": 56}
    model, asked = models(family), [{**long, "seed": seed} for seed in (0, 1)]
    expected = [told(model, way, caches=False, **one)[0] for one in asked]
    for kind in (Rig, DeviceRig):
        found = [told(model, way, caches=True, kind=kind, **one, **pages) for one in asked]
        assert [tokens for tokens, _ in found] == expected
        assert sum(rig.engine.counters.preemptions for _, rig in found) > 0
        assert sum(rig.cache.num_evicted for _, rig in found) > 0


def computed(rig: Rig, *requests: StartDecode) -> int:
    """Runs these requests together; how many tokens of prompts were computed."""
    before = rig.engine.counters.prompt_tokens
    for request in requests:
        rig.start(request)
    rig.run()
    return rig.engine.counters.prompt_tokens - before


def test_the_next_turn_of_a_chat_goes_on_from_prompt_and_answer(
    models: Callable[[str], Transformer],
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
    models: Callable[[str], Transformer],
) -> None:
    rig = Rig(models("sdar"), num_pages=1024)
    prompts = [[*(20 + at % 60 for at in range(56)), *range(20 + n, 28 + n)] for n in range(16)]
    requests = [make_request(str(n), prompt, max_tokens=8) for n, prompt in enumerate(prompts)]
    assert computed(rig, requests[0]) == 64
    assert computed(rig, *requests[1:]) == 15 * 8


def test_an_equal_bidirectional_prompt_is_not_computed_again(
    models: Callable[[str], Transformer],
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


def test_texts_of_another_salt_share_nothing(models: Callable[[str], Transformer]) -> None:
    rig = Rig(models("sdar"))
    for name, salt, expected in (("a", "", 16), ("b", "acme", 16), ("c", "acme", 0)):
        request = make_request(name, range(20, 36), max_tokens=4)
        assert computed(rig, msgspec.structs.replace(request, cache_salt=salt)) == expected


def test_answers_of_another_salt_are_no_siblings(models: Callable[[str], Transformer]) -> None:
    rig = Rig(models("sdar"))
    asked = [make_request(name, range(20, 36), group="g") for name in "abc"]
    assert computed(rig, msgspec.structs.replace(asked[0], cache_salt="acme"), *asked[1:]) == 32
    assert rig.pool.num_free == rig.pool.num_pages


def test_nothing_stays_of_a_request_whose_forward_was_not_finite(
    models: Callable[[str], Transformer],
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
    models: Callable[[str], Transformer], monkeypatch: pytest.MonkeyPatch, bug: str
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
    models: Callable[[str], Transformer], family: str, is_two_sided: bool
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
    models: Callable[[str], Transformer],
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
        pushed.rig.engine.handle(Abort(attempt=request.attempt, reason="test"))
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
