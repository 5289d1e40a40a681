"""What the fleet knows about itself: workers, models, load, and where requests live.

Plain data with a schema: values read from Redis are decoded into these structs or refused. No I/O,
no clock.
"""

from typing import Literal

import msgspec

Role = Literal["prefill", "decode"]
Algorithm = Literal["d2f", "block_diffusion"]
PromptAttention = Literal["causal_blocks", "bidirectional"]
PlacementState = Literal["running", "finished", "failed", "cancelled"]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model a worker serves, in the terms a router needs to check and place requests."""

    name: str  # name to ask for
    architecture: str  # sdar, dream or llada
    block_size: int  # tokens in a diffusion block
    max_model_len: int  # most tokens of prompt and answer together
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    prompt_attention: PromptAttention
    default_algorithm: Algorithm  # used where a request names none


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has and does, at one moment. Counters start with the incarnation."""

    running: int = 0  # attempts that hold pages, those waiting for a peer included
    waiting: int = 0  # attempts that hold none yet
    runnable: int = 0  # attempts that the next step can move without anything from outside
    total_pages: int = 0
    free_pages: int = 0
    quarantined_pages: int = 0  # pages that a late writer may still reach
    queued_tokens: int = 0  # prompt tokens waiting to be prefilled
    blocks_left: int = 0  # blocks still to denoise
    steps: int = 0  # forwards so far
    preemptions: int = 0
    kv_bytes: int = 0  # KV bytes pushed or received
