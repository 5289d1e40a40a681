"""Chats of several turns over tiny models of all families, for tests of kept KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from auditing import audit
from checkpoints import EOS_TOKEN_ID, Architecture, write_tiny_checkpoint
from expert_checkpoints import ExpertFamily, write_expert_checkpoint

from decoding.engines import Rig, load_tiny, make_request
from effuse.config.decoding import Sampling
from effuse.models.transformer import Transformer
from effuse.worker.messages import Abort, Resume, StartDecode

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


class Models:
    """Tiny models by family, made at their first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Transformer] = {}

    def __call__(self, family: str) -> Transformer:
        if family not in self._known:
            path = self._directory / family
            if family in ("sdar_moe", "llada_moe", "llada2_moe"):
                experts: ExpertFamily = family  # type: ignore[assignment]
                write_expert_checkpoint(path, experts, seed=4)
            else:
                architecture: Architecture = family  # type: ignore[assignment]
                write_tiny_checkpoint(path, architecture, seed=3, block_size=BLOCK)
            self._known[family] = load_tiny(path)
        return self._known[family]


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
    asked for again, twice at once, or resumed, and some are abandoned. Those to prompts of an odd
    length are sampled, the others are greedy.
    """

    def __init__(self, rig: Rig, way: str, seed: int, *, most: int = 24) -> None:
        self.rig, self.way, self.most = rig, way, most
        self.draw = random.Random(f"{seed}/{way}")
        self.asked: list[StartDecode] = []

    def ids(self, count: int) -> list[int]:
        return [self.draw.randrange(20, 90) for _ in range(count)]

    def request(self, prompt: Sequence[int], index: int = 0, group: str = "") -> StartDecode:
        temperature = 0.8 if len(prompt) % 2 else 0.0
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
        self.rig.engine.handle(Abort(attempt=one.attempt))
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
    kind: type[Rig] = Rig,
    most: int = 24,
    turns: int = 2,
    **limits: Any,
) -> tuple[list[tuple[int, ...]], Rig]:
    rig = kind(model, caches=caches, **limits)
    found = Chats(rig, way, seed, most=most).run(3, turns)
    audit(rig.engine)
    assert rig.pool.num_free == rig.pool.num_pages
    return found, rig
