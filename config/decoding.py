"""The settings of a request's decoding: names, bounds, defaults, and the resolved values.

Clients, the command's flags and the router's checks take names and bounds from here. `Sampling`,
`Stopping` and `DecodeSettings` are the resolved values for a decode worker. None of them can be
made, or be read from a message, with a value out of bounds. Checks that depend on the model (its
vocabulary, block size and context) are elsewhere. Priorities and objectives have only names and
bounds here.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

import msgspec

Algorithm = Literal["d2f", "block_diffusion", "llada", "dream", "fast_dllm", "fast_dllm_v2"]
"""How blocks are denoised."""
Remasking = Literal[
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
    "entropy_bounded",
    "low_confidence",
    "random",
]
"""Order in which block diffusion (the first four) and LLaDA (the last two) fill masks."""
Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]
"""Which masks Dream writes at a step: random ones, or the best ones by this score."""
Cache = Literal["none", "prefix", "dual"]
"""Parts of a forward that Fast-dLLM keeps: none, those before the block, or all others."""
Score = Literal["confidence", "margin", "neg_entropy"]
"""The score that ranks masks if none passes the threshold."""
Priority = Literal["low", "normal", "high"]
"""Which requests go first in a router's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """An algorithm's settings, and the part of a decode worker that runs it. Its rules are in the
    decode worker's module of the same name."""

    settings: tuple[str, ...]  # those that it uses, by their names in DecodeSettings
    authored: tuple[str, ...] = ()  # those for which authors of models state values
    # The known values of `remasking`, if it uses that, by their numbers in the slots of a device.
    orders: tuple[Remasking, ...] = ()
    is_canvas: bool = False  # denoises prompt and answer together, always on a decode worker
    has_window: bool = False  # several blocks may hold masks at once
    slot_program: int | None = None  # its number in the slots of a device; None: hosts feed it


ALGORITHMS: Final[Mapping[Algorithm, Traits]] = {
    "d2f": Traits(
        settings=(
            "window",
            "score",
            "confidence_threshold",
            "block_add_threshold",
            "full_activation_threshold",
        ),
        has_window=True,
        slot_program=0,
    ),
    "block_diffusion": Traits(
        settings=(
            "score",
            "remasking",
            "denoising_steps",
            "confidence_threshold",
            "entropy_bound",
            "editing_threshold",
            "max_post_steps",
        ),
        authored=("confidence_threshold", "denoising_steps"),
        orders=("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"),
        slot_program=1,
    ),
    "llada": Traits(
        settings=(
            "remasking",
            "block_length",
            "steps",
            "cfg_scale",
            "logits_eos_inf",
            "confidence_eos_eot_inf",
        ),
        authored=("block_length", "remasking"),
        orders=("low_confidence", "random"),
        is_canvas=True,
    ),
    "dream": Traits(
        settings=("steps", "alg", "eps", "alg_temp"), authored=("alg",), is_canvas=True
    ),
    "fast_dllm": Traits(
        settings=("confidence_threshold", "factor", "block_length", "cache"), is_canvas=True
    ),
    "fast_dllm_v2": Traits(
        settings=("confidence_threshold", "block_length"),
        authored=("confidence_threshold", "block_length"),
    ),
}
ADAPTED: Final[Algorithm] = "d2f"
"""The algorithm of published adapters."""


class SettingError(ValueError):
    """A bad value of the setting `name`; `description` has the accepted form and the value."""

    def __init__(self, name: str, expected: str, found: object) -> None:
        self.name = name
        self.description = f"expected {expected}, got {_cut(str(found))}"
        super().__init__(f"{name}: {self.description}")


def _cut(text: str, most: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a setting: from `low` to `high`, both included; never NaN.

    If both are int, the value is a whole number.
    """

    low: float
    high: float
    above_low: bool = False  # `low` itself is excluded
    or_zero: bool = False  # 0 is also accepted
    note: str = ""  # appended to `form`
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_whole", isinstance(self.low, int))

    def __contains__(self, value: float) -> bool:
        if self.low < value <= self.high:
            return not self.above_low or _float32(value) > self.low  # as the wire rounds it
        return (value == self.low and not self.above_low) or (value == 0 and self.or_zero)

    @property
    def form(self) -> str:
        """The accepted form, as errors write it after "expected"."""
        if self.above_low:
            return f"a number above {self.low:g}, at most {self.high:g}{self.note}"
        if self.is_whole:
            return f"an integer from {self.low} to {self.high}{self.note}"
        return f"a number from {self.low:g} to {self.high:g}{self.note}"


_INT32_MAX: Final = 2**31 - 1  # room in a decode worker's slots on a device

BIAS: Final = Bounds(-100.0, 100.0)
MOST_BIASES: Final = 512
MOST_STOPS: Final = 16
STOP_BYTES: Final = Bounds(1, 256)
MOST_STOP_IDS: Final = 64
TOKEN_ID: Final = Bounds(0, 2**32 - 1)  # for one request; vocabularies are smaller
LOGPROBS: Final = Bounds(0, 20)
ANSWERS: Final = Bounds(1, 64)  # for one request; a router may have a lower limit
MAX_TOKENS: Final = Bounds(1, _INT32_MAX)
MIN_TOKENS: Final = Bounds(0, _INT32_MAX)
WINDOW: Final = Bounds(1, 64)
WITHIN: Final = Bounds(0.0, 3600.0, above_low=True)  # seconds of an objective
_SHARE: Final = Bounds(0.0, 1.0)
_PENALTY: Final = Bounds(-2.0, 2.0)

PART_LENGTH: Final = 8  # tokens of a block that Fast-dLLM v2 fills before the next ones
DEFAULT_MAX_TOKENS: Final = 256  # cut to the room that a prompt leaves


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Raises SettingError. Floats are kept as the float32 of the wire."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 keeps all
    seed: int = 0  # uint64, key of the counter-based randomness
    answer_index: int = 0  # distinguishes the answers to one request, which share the seed
    min_p: float = 0.0  # share of the likeliest token's probability; 0 keeps all
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer's final text
    frequency_penalty: float = 0.0  # subtracted once for each time that the text has the token
    repetition_penalty: float = 1.0  # for prompt and final text, arXiv 1909.05858; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, number to add), with ascending ids

    def __post_init__(self) -> None:
        _check_numbers(self, SAMPLING)
        if len(self.logit_bias) > MOST_BIASES:
            found = f"{len(self.logit_bias)} ids"
            raise SettingError("logit_bias", f"at most {MOST_BIASES} ids", found)
        for _, added in self.logit_bias:
            if added not in BIAS:
                raise SettingError("logit_bias", BIAS.form, added)

    @property
    def edits_logits(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return bool(self.min_p or self.logit_bias) or penalties != (0, 0, 1)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends: its length, and ids that end it and are not part of it.

    Raises SettingError.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # no stop id is written before this many tokens

    def __post_init__(self) -> None:
        _check_numbers(self, STOPPING)
        if self.min_tokens > self.max_tokens:
            raise SettingError(
                "min_tokens", f"at most max_tokens {self.max_tokens}", self.min_tokens
            )


class BlockRules(msgspec.Struct, frozen=True, kw_only=True):
    """How blocks are denoised that are appended one after another."""

    algorithm: Algorithm
    denoising_steps: int  # forwards for one block (block diffusion)
    window: int = 4  # most ACTIVE blocks in flight (D2F)
    confidence_threshold: float = 0.9  # a mask is written if its confidence is strictly above
    block_add_threshold: float = 0.1  # progress of the last block that appends the next one
    full_activation_threshold: float = 0.95  # from this progress on, the next block must advance
    score: Score = "confidence"
    remasking: Remasking = "low_confidence_dynamic"
    entropy_bound: float = 0.35  # nats of masks that one step writes (entropy_bounded)
    editing_threshold: float = 1.0  # a written token is replaced by one above it; 1 never edits
    max_post_steps: int = 16  # most forwards that edit a block without masks


class DecodeSettings(BlockRules, frozen=True, kw_only=True):
    """How an answer is denoised, with the names of DecodeSettings in worker.proto. The settings are
    those of D2F (arXiv 2508.09192), SDAR, LLaDA (arXiv 2502.09992), Dream (arXiv 2508.15487),
    Fast-dLLM (arXiv 2505.22618) and its v2 (arXiv 2509.26328), and LLaDA2.1 (arXiv 2602.08676).

    Raises SettingError. Floats are stored as the float32 of the wire, so that a comparison with a
    threshold has the same result everywhere.
    """

    block_length: int = 32  # tokens of a canvas, or of a block, that are denoised together
    steps: int = 0  # forwards for a canvas, spread over its blocks; 0 means one for each token
    cfg_scale: float = 0.0  # strength of classifier-free guidance; 0 turns it off
    logits_eos_inf: bool = False  # an end-of-sequence id is never written
    confidence_eos_eot_inf: bool = False  # end-of-sequence ids are written last
    alg: Alg = "origin"
    eps: float = 1e-3  # end of the time that begins at 1
    alg_temp: float = 0.0  # temperature at which the best masks are drawn; 0 takes the best
    cache: Cache = "none"
    factor: float = 0.0  # n masks are written while n + 1 times their doubt is below; 0: off

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (found := getattr(self, name)) not in known:
                raise SettingError(name, f"one of {', '.join(known)}", repr(found))
        _check_numbers(self, SETTINGS)

    @property
    def ranked_by(self) -> Score:
        """The score of the masks: entropy_bounded always adds up entropies."""
        return "neg_entropy" if self.remasking == "entropy_bounded" else self.score

    @property
    def edits_tokens(self) -> bool:
        """Whether written tokens of a block in flight may be replaced (block diffusion)."""
        return self.algorithm == "block_diffusion" and self.editing_threshold < 1

    @property
    def is_canvas(self) -> bool:
        """Whether prompt and answer form one canvas, in which each token sees all others."""
        return ALGORITHMS[self.algorithm].is_canvas

    @property
    def most_active(self) -> int:
        """Most blocks that may hold masks at once."""
        return self.window if ALGORITHMS[self.algorithm].has_window else 1


def used(settings: DecodeSettings) -> DecodeSettings:
    """Without settings of other algorithms that some code obeys whatever the algorithm is. Raises
    SettingError for an order of unmasking that has no number in a device's slots."""
    traits = ALGORITHMS[settings.algorithm]
    has_number = not traits.orders or settings.remasking in traits.orders
    if traits.slot_program is not None and not has_number:
        form = f"one of {', '.join(traits.orders)} with {settings.algorithm}"
        raise SettingError("remasking", form, settings.remasking)
    plain = DecodeSettings(algorithm=settings.algorithm, denoising_steps=settings.denoising_steps)
    names = {"cache", "cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf"}
    unused = names.difference(traits.settings)
    return msgspec.structs.replace(settings, **{name: getattr(plain, name) for name in unused})


class DecodingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model's defaults for the settings that a request leaves out.

    Routers apply them, so that workers receive every setting. `sources` names the file or the code
    that a value is from; a setting that it does not list has effuse's own default.
    """

    settings: DecodeSettings
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    max_tokens: int = DEFAULT_MAX_TOKENS  # cut to the room that a prompt leaves
    sources: tuple[tuple[str, str], ...] = ()  # (setting, source)

    def __post_init__(self) -> None:
        _check_numbers(self, {"max_tokens": MAX_TOKENS})

    def settings_of(self, algorithm: Algorithm, block_size: int) -> DecodeSettings:
        """The settings of `algorithm`: the model's values only if it is the model's own."""
        if algorithm == self.settings.algorithm:
            return self.settings
        return plain_settings(algorithm, block_size)


def plain_settings(algorithm: Algorithm, block_size: int) -> DecodeSettings:
    """The settings of `algorithm` for a model of an unknown family."""
    settings = DecodeSettings(algorithm=algorithm, denoising_steps=block_size)
    if algorithm == "fast_dllm_v2":
        return msgspec.structs.replace(settings, block_length=min(PART_LENGTH, block_size))
    if not settings.is_canvas:
        return settings
    return msgspec.structs.replace(settings, block_length=block_size, remasking="low_confidence")


_FLOAT32: Final = struct.Struct("f")


def _float32(number: float) -> float:
    return cast(float, _FLOAT32.unpack(_FLOAT32.pack(number))[0])


SAMPLING: Final[Mapping[str, Bounds]] = {
    "temperature": Bounds(1e-3, 100.0, or_zero=True, note=", or 0 for greedy"),
    "top_p": Bounds(0.0, 1.0, above_low=True),
    "top_k": Bounds(0, _INT32_MAX, note="; 0 keeps all"),
    "seed": Bounds(0, 2**64 - 1),
    "answer_index": Bounds(0, 63),
    "min_p": _SHARE,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Bounds(0.1, 10.0),
}
STOPPING: Final[Mapping[str, Bounds]] = {"max_tokens": MAX_TOKENS, "min_tokens": MIN_TOKENS}
OBJECTIVES: Final[Mapping[str, Bounds]] = {"first_block_within": WITHIN, "gap_within": WITHIN}
SETTINGS: Final[Mapping[str, Bounds]] = {
    "window": WINDOW,
    "confidence_threshold": _SHARE,
    "block_add_threshold": _SHARE,
    "full_activation_threshold": _SHARE,
    "denoising_steps": Bounds(1, _INT32_MAX),
    "entropy_bound": Bounds(0.0, 1000.0),  # nats; 64 unknown tokens have about 800
    "editing_threshold": _SHARE,
    "max_post_steps": Bounds(0, 1024),
    "factor": Bounds(0.0, 1000.0, note="; 0 uses the threshold"),
    "block_length": Bounds(1, _INT32_MAX),
    "steps": Bounds(0, 65536, note="; 0 takes one for each token"),
    "cfg_scale": Bounds(0.0, 100.0),
    "eps": _SHARE,
    "alg_temp": Bounds(1e-3, 100.0, or_zero=True, note=", or 0 for no randomness"),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "algorithm": get_args(Algorithm),
    "score": get_args(Score),
    "remasking": get_args(Remasking),
    "alg": get_args(Alg),
    "cache": get_args(Cache),
}


_USUAL: Final[Mapping[type[msgspec.Struct], Mapping[str, object]]] = {
    kind: {
        field.name: _float32(field.default) if isinstance(field.default, float) else field.default
        for field in msgspec.structs.fields(kind)
    }
    for kind in (Sampling, Stopping, DecodeSettings, DecodingDefaults)
}
"""Checked defaults, kept because most requests have them and need no further check."""


def _check_numbers(value: msgspec.Struct, bounds: Mapping[str, Bounds]) -> None:
    usual = _USUAL[type(value)]
    for name, accepted in bounds.items():
        found, default = getattr(value, name), usual[name]
        if found == default and type(found) is type(default):
            continue
        if found not in accepted:
            raise SettingError(name, accepted.form, found)
        if not accepted.is_whole:
            msgspec.structs.force_setattr(value, name, _float32(found))
