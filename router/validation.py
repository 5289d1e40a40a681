"""From a client's request to one in which every setting is resolved, or to all that is wrong.

Pure: the request and what is known of the model in, values out. Done before anything is reserved,
before the prompt is tokenised. Each violation names the accepted form and what was found. Not here:
whether the model exists (`catalogue.py`), whether there is room (`admission.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from effuse.client.params import ALGORITHMS, ALGS, CACHES, REMASKINGS, SCORES
from effuse.config.decoding import (
    ALG_TEMP,
    BLOCK_LENGTH,
    CANVAS_ALGORITHMS,
    CFG_SCALE,
    DEFAULT_MAX_TOKENS,
    DENOISING_STEPS,
    EPS,
    MAX_TOKENS,
    STEPS,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    WINDOW,
    Algorithm,
    Bounds,
    DecodeSettings,
    Remasking,
    Sampling,
)
from effuse.placement.records import ModelInfo
from effuse.protos.errors import FieldViolation, InvalidRequest
from effuse.v1 import generation_pb2 as pb

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_FORM: Final = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,255}")
MODEL_NAME_FORM: Final = "1 to 256 characters of A-Z a-z 0-9 . _ : / + @ -, without '..' or '//'"

MAX_STOPS, MAX_STOP_BYTES, MAX_STOP_IDS = 16, 256, 64
MAX_BYTES_PER_TOKEN: Final = 16
"""No prose comes near it; text above it cannot fit the context and is refused before it costs."""

ALGORITHM_NAMES: Final = tuple(pb.Algorithm.keys())
SCORE_NAMES: Final = tuple(pb.Score.keys())
REMASKING_NAMES: Final = tuple(pb.Remasking.keys())
ALG_NAMES: Final = tuple(pb.Alg.keys())
CACHE_NAMES: Final = tuple(pb.Cache.keys())
_ALGORITHMS: Final = {number: name for name, number in ALGORITHMS.items()}
_SCORES: Final = {number: name for name, number in SCORES.items()}
_CACHES: Final = {number: name for name, number in CACHES.items()}
_ALGS: Final = {number: name for name, number in ALGS.items()}
_REMASKINGS: Final = {number: name for name, number in REMASKINGS.items()}

THRESHOLDS: Final = ("confidence_threshold", "block_add_threshold", "full_activation_threshold")
KNOBS: Final[Mapping[Algorithm, Collection[str]]] = {
    "d2f": {"window", "score", *THRESHOLDS},
    "block_diffusion": {"score", "remasking", "denoising_steps", "confidence_threshold"},
    "llada": {
        "remasking",
        "block_length",
        "steps",
        "cfg_scale",
        "logits_eos_inf",
        "confidence_eos_eot_inf",
    },
    "dream": {"steps", "alg", "eps", "alg_temp"},
    "fast_dllm": {"confidence_threshold", "block_length", "cache"},
}
"""Fields of DecodingParams that each algorithm uses."""
ORDERS: Final[Mapping[Algorithm, Sequence[Remasking]]] = {
    "block_diffusion": ("low_confidence_dynamic", "low_confidence_static", "sequential"),
    "llada": ("low_confidence", "random"),
}
"""Values of `remasking` that each algorithm knows, its default first."""


@dataclass(slots=True)
class Findings:
    """What is wrong with one request so far."""

    violations: list[FieldViolation] = field(default_factory=list)

    def add(self, name: str, expected: str, found: object) -> None:
        """One more violation."""
        self.violations.append(FieldViolation(name, f"expected {expected}, got {found}"))

    def raise_any(self) -> None:
        """Raises `InvalidRequest` with all of them, if there are any."""
        if self.violations:
            raise InvalidRequest(self.violations)

    def number(self, name: str, value: float, bounds: Bounds) -> None:
        """A number within `bounds`."""
        if value not in bounds:
            self.add(name, bounds.form, f"{value:g}" if isinstance(value, float) else value)

    def choice(self, name: str, value: int, names: Sequence[str]) -> None:
        """An enum value that has a name; protobuf lets unknown numbers pass."""
        if not 0 <= value < len(names):
            self.add(name, f"one of {', '.join(names)}", f"the unknown value {value}")

    def token_ids(
        self, name: str, ids: Sequence[int], vocab_size: int, refused: Mapping[int, str]
    ) -> None:
        """Ids of the vocabulary, but for `refused`, which says what those are; the first bad one
        is named."""
        if max(ids, default=0) >= vocab_size:
            at, bad = next((at, i) for at, i in enumerate(ids) if i >= vocab_size)
            self.add(f"{name}[{at}]", f"an id below the vocabulary size {vocab_size}", bad)
        elif not refused.keys().isdisjoint(ids):
            at, bad = next((at, i) for at, i in enumerate(ids) if i in refused)
            self.add(f"{name}[{at}]", "an id that stands for text", f"the {refused[bad]} id {bad}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request whose settings are resolved and right. Its prompt is text or ids, not both."""

    model: ModelInfo
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None  # None takes the default, cut to the room that the prompt leaves
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    sampling: Sampling
    settings: DecodeSettings
    wants_token_ids: bool
    wants_drafts: bool


def validate(
    request: pb.GenerateRequest,
    model: ModelInfo,
    reserved_ids: Collection[int] = (),
    *,
    is_stream: bool,
    decode_prefills: bool = True,
) -> Asked:
    """Resolves `request` for `model`; raises `InvalidRequest` naming every field that is wrong.

    `reserved_ids`: special ids beside the mask id that no prompt may hold, such as padding.
    `decode_prefills`: whether decode workers may compute prompts themselves."""
    findings = Findings()
    refused = {i: "reserved" for i in reserved_ids if i not in model.eos_token_ids}
    refused[model.mask_token_id] = "mask"
    _check_prompt(request, model, refused, findings)
    _check_sampling(request.sampling, model, findings)
    _check_stopping(request.stopping, model, findings)
    algorithm = _check_decoding(request.decoding, model, findings)
    _check_canvas(request.sampling, algorithm, model, decode_prefills, findings)
    if request.output.drafts and not is_stream:
        findings.add("output.drafts", "false for Generate (only GenerateStream sends them)", "true")
    findings.raise_any()
    return Asked(
        model=model,
        prompt=request.prompt if request.HasField("prompt") else None,
        prompt_token_ids=tuple(request.prompt_token_ids.ids),
        max_tokens=request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None,
        stops=tuple(request.stopping.stop),
        stop_token_ids=_resolve_stop_ids(request.stopping, model),
        sampling=_resolve_sampling(request.sampling),
        settings=_resolve_settings(request.decoding, algorithm, model),
        wants_token_ids=request.output.token_ids,
        wants_drafts=request.output.drafts,
    )


def fit(prompt_len: int, max_tokens: int | None, model: ModelInfo) -> int:
    """Returns how many tokens to generate; raises `InvalidRequest` with the numbers where prompt
    and answer exceed the model's context."""
    room = model.max_model_len - prompt_len
    findings = Findings()
    if prompt_len == 0:
        findings.add("prompt", "text that makes at least one token", "none")
    elif room < 1:
        limit = f"at most {model.max_model_len - 1} prompt tokens, so that one can be generated"
        findings.add("prompt", limit, f"{prompt_len} tokens")
    elif max_tokens is not None and max_tokens > room:
        limit = (
            f"at most {room}: the prompt has {prompt_len} tokens and "
            f"the model takes {model.max_model_len} in all"
        )
        findings.add("stopping.max_tokens", limit, max_tokens)
    findings.raise_any()
    return min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens


def check_request_id(request_id: str, findings: Findings) -> None:
    """A request id in the accepted form."""
    if not REQUEST_ID.fullmatch(request_id):
        findings.add("request_id", REQUEST_ID_FORM, shown(request_id))


def check_model_name(name: str, field_name: str, findings: Findings) -> None:
    """A model name in the accepted form; whether there is such a model is another question."""
    if not MODEL_NAME.fullmatch(name) or ".." in name or "//" in name:
        findings.add(field_name, MODEL_NAME_FORM, shown(name))


def shown(text: str, most: int = 40) -> str:
    """`text` as it may stand in an error: quoted, in ASCII, cut."""
    tail = "" if len(text) <= most else f"... ({len(text)} characters)"
    return ascii(text[:most]) + tail


def _check_prompt(
    request: pb.GenerateRequest, model: ModelInfo, refused: Mapping[int, str], findings: Findings
) -> None:
    kind = request.WhichOneof("input")
    if kind is None:
        findings.add("prompt", "either prompt or prompt_token_ids", "neither")
    elif kind == "prompt":
        num_bytes = len(request.prompt.encode())
        most = MAX_BYTES_PER_TOKEN * model.max_model_len
        if num_bytes == 0:
            findings.add("prompt", "text of at least one character", "an empty string")
        elif num_bytes > most:
            context = f"the model takes {model.max_model_len} tokens"
            findings.add("prompt", f"at most {most} bytes ({context})", f"{num_bytes} bytes")
    else:
        _check_prompt_ids(request.prompt_token_ids, model, refused, findings)


def _check_prompt_ids(
    token_ids: pb.TokenIds, model: ModelInfo, refused: Mapping[int, str], findings: Findings
) -> None:
    name, num_ids = "prompt_token_ids.ids", len(token_ids.ids)
    if num_ids == 0:
        findings.add(name, "at least one id", "none")
    elif num_ids >= model.max_model_len:
        findings.add(name, f"at most {model.max_model_len - 1} ids", f"{num_ids} ids")
    else:
        findings.token_ids(name, token_ids.ids, model.vocab_size, refused)


def _check_sampling(sampling: pb.SamplingParams, model: ModelInfo, findings: Findings) -> None:
    if sampling.HasField("temperature"):
        findings.number("sampling.temperature", sampling.temperature, TEMPERATURE)
    if sampling.HasField("top_p"):
        findings.number("sampling.top_p", sampling.top_p, TOP_P)
    if sampling.HasField("top_k"):
        findings.number("sampling.top_k", sampling.top_k, replace(TOP_K, high=model.vocab_size))


def _check_stopping(stopping: pb.StoppingParams, model: ModelInfo, findings: Findings) -> None:
    if stopping.HasField("max_tokens"):
        bounds = replace(MAX_TOKENS, high=model.max_model_len - 1)
        findings.number("stopping.max_tokens", stopping.max_tokens, bounds)
    if len(stopping.stop) > MAX_STOPS:
        findings.add("stopping.stop", f"at most {MAX_STOPS} strings", len(stopping.stop))
    else:
        for at, stop in enumerate(stopping.stop):
            num_bytes = len(stop.encode())
            if not 1 <= num_bytes <= MAX_STOP_BYTES:
                form = f"a string of 1 to {MAX_STOP_BYTES} bytes"
                findings.add(f"stopping.stop[{at}]", form, f"{num_bytes} bytes")
        if len(set(stopping.stop)) < len(stopping.stop):
            findings.add("stopping.stop", "strings that differ", "one of them twice")
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        form = f"at most {MAX_STOP_IDS} ids"
        findings.add("stopping.stop_token_ids", form, len(stopping.stop_token_ids))
    else:
        findings.token_ids(
            "stopping.stop_token_ids", stopping.stop_token_ids, model.vocab_size,
            {model.mask_token_id: "mask"},
        )  # fmt: skip


def _check_decoding(decoding: pb.DecodingParams, model: ModelInfo, findings: Findings) -> Algorithm:
    """Checks the knobs and returns the algorithm they are for."""
    findings.choice("decoding.algorithm", decoding.algorithm, ALGORITHM_NAMES)
    findings.choice("decoding.score", decoding.score, SCORE_NAMES)
    findings.choice("decoding.remasking", decoding.remasking, REMASKING_NAMES)
    findings.choice("decoding.alg", decoding.alg, ALG_NAMES)
    findings.choice("decoding.cache", decoding.cache, CACHE_NAMES)
    for name in THRESHOLDS:  # one that is not set reads as 0, which is in range
        findings.number(f"decoding.{name}", getattr(decoding, name), THRESHOLD)
    for name, bounds in (
        ("window", WINDOW),
        ("denoising_steps", _up_to_block_size(DENOISING_STEPS, model)),
        ("block_length", BLOCK_LENGTH),
        ("steps", STEPS),
        ("cfg_scale", CFG_SCALE),
        ("eps", EPS),
        ("alg_temp", ALG_TEMP),
    ):
        if decoding.HasField(name):
            findings.number(f"decoding.{name}", getattr(decoding, name), bounds)
    algorithm: Algorithm = _ALGORITHMS.get(decoding.algorithm, model.default_algorithm)
    _check_conflicts(decoding, algorithm, findings)
    return algorithm


def _up_to_block_size(bounds: Bounds, model: ModelInfo) -> Bounds:
    return replace(bounds, high=model.block_size, note=", the model's block size")


def _check_conflicts(decoding: pb.DecodingParams, algorithm: Algorithm, findings: Findings) -> None:
    """A knob without effect is a mistake that would pass in silence."""
    for field_, _ in decoding.ListFields():
        if field_.name != "algorithm" and field_.name not in KNOBS[algorithm]:
            form = f"it unset with {algorithm}, which does not use it"
            findings.add(f"decoding.{field_.name}", form, "a value")
    known, asked = ORDERS.get(algorithm), _REMASKINGS.get(decoding.remasking)
    if known and asked and asked not in known:
        form = f"one of {', '.join(known)} with {algorithm}"
        findings.add("decoding.remasking", form, asked)


def _check_canvas(
    sampling: pb.SamplingParams,
    algorithm: Algorithm,
    model: ModelInfo,
    decode_prefills: bool,
    findings: Findings,
) -> None:
    """What algorithms ask of model and fleet that denoise prompt and answer as one canvas."""
    # LLaDA's loop and Fast-dLLM's for its models draw from all tokens.
    if algorithm == "llada" or (algorithm == "fast_dllm" and model.architecture == "llada"):
        for name in ("top_p", "top_k"):
            if sampling.HasField(name):
                form = f"it unset with {algorithm}, which does not use it"
                findings.add(f"sampling.{name}", form, "a value")
    if algorithm not in CANVAS_ALGORITHMS:
        return
    others = " or ".join(name for name in _ALGORITHMS.values() if name not in CANVAS_ALGORITHMS)
    if model.prompt_attention != "bidirectional":
        form = f"{others} for a model whose prompt does not attend to all of itself"
        findings.add("decoding.algorithm", form, algorithm)
    elif not decode_prefills:
        form = f"{others}, as this fleet prefills on prefill workers alone (--prefill remote)"
        findings.add("decoding.algorithm", form, algorithm)


def _resolve_stop_ids(stopping: pb.StoppingParams, model: ModelInfo) -> tuple[int, ...]:
    eos = () if stopping.ignore_eos else model.eos_token_ids
    return tuple(sorted({*eos, *stopping.stop_token_ids}))


def _resolve_sampling(sampling: pb.SamplingParams) -> Sampling:
    return Sampling(**_given(sampling))


def _resolve_settings(
    decoding: pb.DecodingParams, algorithm: Algorithm, model: ModelInfo
) -> DecodeSettings:
    whole_block = {"denoising_steps": model.block_size, "block_length": model.block_size}
    knobs = whole_block | _given(decoding) | {"algorithm": algorithm}
    if decoding.score:
        knobs["score"] = _SCORES[decoding.score]
    if decoding.alg:
        knobs["alg"] = _ALGS[decoding.alg]
    if decoding.cache:
        knobs["cache"] = _CACHES[decoding.cache]
    if algorithm in ORDERS:
        knobs["remasking"] = _REMASKINGS.get(decoding.remasking, ORDERS[algorithm][0])
    return DecodeSettings(**knobs)


def _given(params: pb.SamplingParams | pb.DecodingParams) -> dict[str, Any]:
    """The fields that are set; the rest take the defaults of what has the same names."""
    return {field.name: value for field, value in params.ListFields()}
