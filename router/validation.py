"""From a client's request to one in which every setting is resolved, or to all findings against it;
later to the ids of its prompt.

`validate` is pure: the request and the model's description in, values out. It runs before anything
is reserved, and before the prompt is tokenised. Not here: its input (`findings.py`), whether the
model exists (`seats.py`), whether there is room (`admission.py`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from effuse.client.chat import Chat
from effuse.client.params import NAMES
from effuse.config.decoding import (
    ALGORITHMS,
    ANSWERS,
    BIAS,
    LOGPROBS,
    MOST_BIASES,
    OBJECTIVES,
    SAMPLING,
    SETTINGS,
    STOPPING,
    Algorithm,
    Bounds,
    DecodeSettings,
    Priority,
    Sampling,
)
from effuse.placement.records import ModelInfo
from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.router.chat_template import ChatTemplateError
from effuse.router.config import RequestClass
from effuse.router.findings import (
    Findings,
    check_input,
    check_request_id,
    most_prompt_bytes,
    shown,
)
from effuse.router.measures import NO_GOALS, Goals
from effuse.router.sizes import AT_ONCE, NO_ROOMS, Rooms, room_for, sizes_of
from effuse.router.special_tokens import strings_of
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2 as pb

_BY_NUMBER: Final[Mapping[str, Mapping[int, Any]]] = {
    setting: {number: name for name, number in numbers.items()}
    for setting, numbers in NAMES.items()
}
_WIRE_NAMES: Final[Mapping[str, Sequence[str]]] = {
    setting: tuple(getattr(pb, setting.title()).keys()) for setting in NAMES
}  # names of settings on the wire, by their numbers
_NUMBERS: Final[Mapping[str, Mapping[str, Bounds]]] = {  # by the parts of a request's message
    "sampling": SAMPLING,
    "stopping": STOPPING,
    "objectives": OBJECTIVES,
    "output": {"logprobs": LOGPROBS},
}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose settings are resolved and right."""

    sent: pb.GenerateRequest  # the client's own message
    model: ModelInfo
    chat: Chat | None  # if its prompt is one
    refused_ids: Mapping[int, str]  # that no client may put into a prompt, and their kinds
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    sampling: Sampling  # its seed is 0 until one is drawn
    num_answers: int
    settings: DecodeSettings
    priority: Priority
    goals: Goals  # its own objectives, else those of its class, else the router's

    @property
    def most_tokens(self) -> int:
        """Tokens that the answer may have, in a context that has room for them."""
        stopping = self.sent.stopping
        has_own = stopping.HasField("max_tokens")
        return stopping.max_tokens if has_own else self.model.defaults.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest ids beside each token's log-probability; None sends none."""
        output = self.sent.output
        return output.logprobs if output.HasField("logprobs") else None

    def without_prompt(self, num_shown: int) -> Asked:
        """The same without the prompt, which may be large, except for `num_shown` characters."""
        sent = self.sent
        kept = pb.GenerateRequest(prompt=sent.prompt[:num_shown], request_class=sent.request_class)
        for name in ("sampling", "stopping", "output"):
            if sent.HasField(name):
                getattr(kept, name).CopyFrom(getattr(sent, name))
        return msgspec.structs.replace(self, sent=kept, chat=None, refused_ids={})

    def seeded(self, fresh: int) -> Asked:
        """The same with the seed `fresh`, a uint64, if the client set none."""
        if self.sent.sampling.HasField("seed"):
            return self
        sampling = msgspec.structs.replace(self.sampling, seed=fresh)
        return msgspec.structs.replace(self, sampling=sampling)


def validate(
    request: pb.GenerateRequest,
    model: ModelInfo,
    reserved_ids: Collection[int] = (),
    *,
    is_stream: bool,
    decode_prefills: bool = True,
    takes_chats: bool = True,
    chat_end_ids: Collection[int] = (),
    answers: Bounds = ANSWERS,
    seed: int = 0,
    classes: Mapping[str, RequestClass] = {},
    goals: Goals = NO_GOALS,
) -> Asked:
    """Resolves `request` for `model`; raises `InvalidRequest` naming every field that is wrong.

    `reserved_ids`: special ids beside the mask id that no prompt may hold, such as padding.
    `takes_chats`: whether there is a chat template for the model. `chat_end_ids`: ids that end an
    answer in it, beside the model's end-of-sequence ids. `decode_prefills`: whether decode workers
    may compute prompts themselves. `answers`: how many a request may ask for. `seed`: a uint64, for
    a request that sets none. `classes`: the router's classes by name. `goals`: its objectives."""
    findings = Findings()
    refused = {i: "reserved" for i in reserved_ids if i not in model.eos_token_ids}
    refused[model.mask_token_id] = "mask"
    if request.HasField("request_id"):
        check_request_id(request.request_id, findings)
    chat = check_input(request, model, refused, takes_chats, findings)
    _check_numbers(request, model, findings)
    _check_bias(request.sampling.logit_bias, refused, model, findings)
    _check_stopping(request.stopping, model, findings)
    algorithm = _check_decoding(request.decoding, model, findings)
    _check_algorithm(request.sampling, algorithm, model, decode_prefills, findings)
    num_answers = request.n if request.HasField("n") else 1
    findings.number("n", num_answers, answers)
    own_class, own_goals = _check_objectives(request, classes, findings)
    for name, what in (("drafts", "them"), ("prompt_progress", "it")):
        if getattr(request.output, name) and not is_stream:
            form = f"false for Generate (only GenerateStream sends {what})"
            findings.add(f"output.{name}", form, "true")
    findings.raise_any()
    end_ids = {*model.eos_token_ids, *(() if chat is None else chat_end_ids)}
    if request.stopping.ignore_eos:
        end_ids = set()
    return Asked(
        sent=request,
        model=model,
        chat=chat,
        refused_ids=refused,
        stop_token_ids=tuple(sorted(end_ids.union(request.stopping.stop_token_ids))),
        sampling=_resolve_sampling(request.sampling, model, seed),
        num_answers=num_answers,
        settings=_resolve_settings(request.decoding, algorithm, model),
        priority=_BY_NUMBER["priority"].get(request.priority, own_class.priority),
        goals=own_goals.or_else(own_class.goals).or_else(goals),
    )


def _check_objectives(
    request: pb.GenerateRequest, classes: Mapping[str, RequestClass], findings: Findings
) -> tuple[RequestClass, Goals]:
    """The class that a request names, and the objectives that it sets itself."""
    findings.choice("priority", request.priority, _WIRE_NAMES["priority"])
    given = _given(request.objectives)
    own = Goals(*(given.get(name, math.inf) for name in OBJECTIVES))
    if not request.HasField("request_class"):
        return RequestClass(), own
    name, form = request.request_class, f"one of {', '.join(classes)}"
    if name not in classes:
        none = "no value, because no classes are defined (--request-class of a router)"
        findings.add("request_class", form if classes else none, shown(name))
    return classes.get(name, RequestClass()), own


def fit(prompt_len: int, asked: Asked, rooms: Rooms = NO_ROOMS) -> int:
    """Returns how many tokens to generate; raises `InvalidRequest` with the numbers if no worker
    can ever hold prompt and answer. `rooms`: those of the fleet's workers, as far as known."""
    model, settings, stopping = asked.model, asked.settings, asked.sent.stopping
    has_own, most = stopping.HasField("max_tokens"), asked.most_tokens
    (most_tokens, why), answers = room_for(prompt_len, model, settings, rooms)
    room, bound = max(answers.values(), default=(0, ""))
    findings = Findings()
    if prompt_len == 0:
        findings.add("prompt", "text that makes at least one token", "none")
    elif prompt_len > most_tokens:
        limit = f"at most {most_tokens} prompt tokens, {why}"
        findings.add("prompt", limit, f"{prompt_len} tokens")
    elif has_own and most > room:
        limit = f"at most {room}: the prompt has {prompt_len} tokens and {bound}"
        findings.add("stopping.max_tokens", limit, most)
    found = most if has_own else min(most, room)
    if stopping.min_tokens > found and not findings.violations:
        limit = f"at most {found}, the model's max_tokens within the room that the prompt leaves"
        findings.add("stopping.min_tokens", limit, stopping.min_tokens)
    findings.raise_any()
    most_rows = max(r.rows for r, (n, _) in answers.items() if n >= found)
    _check_rows(prompt_len, found, asked, most_rows)
    return found


def _check_rows(prompt_len: int, max_tokens: int, asked: Asked, most: int) -> None:
    """Refuses steps of more rows than the workers with room for everything else compute."""
    end, size, window = prompt_len + max_tokens, asked.model.block_size, asked.settings.most_active
    rows = sizes_of(prompt_len, max_tokens, asked.model, asked.settings).decode.rows
    passes = rows // end or 1
    if rows > most and asked.settings.is_canvas:
        limit = f"expected prompt and answer of at most {most // passes} tokens"
        raise InvalidRequest.of("prompt", f"{limit}, {AT_ONCE}, got {end} tokens")
    if rows > most:
        limit = f"expected at most {most // size - 1} blocks of {size}, beside a settled one"
        raise InvalidRequest.of("decoding.window", f"{limit}, {AT_ONCE}, got {window}")


def _check_numbers(request: pb.GenerateRequest, model: ModelInfo, findings: Findings) -> None:
    """Those that mean the same with every algorithm."""
    stopping, room = request.stopping, model.max_model_len - 1
    longest = stopping.max_tokens if stopping.HasField("max_tokens") else room
    most = {"top_k": model.vocab_size, "max_tokens": room, "min_tokens": longest}
    for section, known in _NUMBERS.items():
        for name, value in _given(getattr(request, section)).items():
            if name in known:
                findings.number(f"{section}.{name}", value, known[name], most=most.get(name))


def _check_bias(
    biases: Mapping[int, float], refused: Mapping[int, str], model: ModelInfo, findings: Findings
) -> None:
    name = "sampling.logit_bias"
    if len(biases) > MOST_BIASES:
        findings.add(name, f"at most {MOST_BIASES} ids", len(biases))
        return
    for token in sorted(biases):
        if token >= model.vocab_size:
            findings.add(name, f"ids below the vocabulary size {model.vocab_size}", token)
        elif token in refused:
            findings.add(name, "ids that stand for text", f"the {refused[token]} id {token}")
        elif biases[token] not in BIAS:
            findings.add(f"{name}[{token}]", BIAS.form, f"{biases[token]:g}")
        else:
            continue
        break


def _check_stopping(stopping: pb.StoppingParams, model: ModelInfo, findings: Findings) -> None:
    name, ids = "stop_token_ids", stopping.stop_token_ids
    if stopping.stop:
        findings.settings({"stop": tuple(stopping.stop)}, "stopping.{}".format)
    if ids and not findings.settings({name: ids}, "stopping.{}".format):
        refused = {model.mask_token_id: "mask"}
        findings.token_ids(f"stopping.{name}", ids, model.vocab_size, refused)


def _check_decoding(decoding: pb.DecodingParams, model: ModelInfo, findings: Findings) -> Algorithm:
    """Checks the knobs and returns the algorithm they are for."""
    default = model.defaults.settings.algorithm
    algorithm: Algorithm = _BY_NUMBER["algorithm"].get(decoding.algorithm, default)
    traits = ALGORITHMS[algorithm]
    for knob, value in decoding.ListFields():
        name = f"decoding.{knob.name}"
        if (names := _WIRE_NAMES.get(knob.name)) is not None:
            findings.choice(name, value, names)
        elif (bounds := SETTINGS.get(knob.name)) is not None:
            if knob.name == "denoising_steps":
                bounds = replace(bounds, high=model.block_size, note=", the model's block size")
            findings.number(name, value, bounds)
        # A knob without effect is a mistake that would pass in silence.
        if knob.name != "algorithm" and knob.name not in traits.settings:
            findings.add(name, f"no value with {algorithm}, which does not use it", "a value")
    asked = _BY_NUMBER["remasking"].get(decoding.remasking)
    if traits.orders and asked and asked not in traits.orders:
        form = f"one of {', '.join(traits.orders)} with {algorithm}"
        findings.add("decoding.remasking", form, asked)
    if decoding.factor and model.architecture in ("dream", "fast_dllm_v2"):
        findings.add("decoding.factor", "no value with a model that shifts its logits", "a value")
    if decoding.factor and decoding.HasField("confidence_threshold"):
        findings.add("decoding.confidence_threshold", "no value with a factor", "a value")
    return algorithm


def _check_algorithm(
    sampling: pb.SamplingParams,
    algorithm: Algorithm,
    model: ModelInfo,
    decode_prefills: bool,
    findings: Findings,
) -> None:
    """What an algorithm asks of model and fleet, above all that of a canvas."""
    # LLaDA's loop draws from all tokens, and so does Fast-dLLM's except for Dream.
    if algorithm == "llada" or (algorithm == "fast_dllm" and model.architecture != "dream"):
        for name in ("top_p", "top_k", "min_p"):
            if sampling.HasField(name):
                form = f"no value with {algorithm}, which does not use it"
                findings.add(f"sampling.{name}", form, "a value")
    is_canvas = ALGORITHMS[algorithm].is_canvas
    if algorithm == "fast_dllm_v2" and model.architecture != "fast_dllm_v2":
        why = " for a model that was not tuned for it"
    elif is_canvas and model.prompt_attention != "bidirectional":
        why = " for a model whose prompt does not attend to all of itself"
    elif is_canvas and not decode_prefills:
        why = ", because only prefill workers prefill in this fleet (--prefill remote)"
    else:
        return
    findings.add("decoding.algorithm", f"{_by_blocks(model)}{why}", algorithm)


def _by_blocks(model: ModelInfo) -> str:
    """Algorithms that any model takes, except those that need a tuned model."""
    return " or ".join(
        algorithm
        for algorithm, traits in ALGORITHMS.items()
        if not traits.is_canvas and (algorithm != "fast_dllm_v2" or model.architecture == algorithm)
    )


def _resolve_sampling(sampling: pb.SamplingParams, model: ModelInfo, seed: int) -> Sampling:
    given = {"seed": seed, **_given(sampling)}
    if sampling.logit_bias:
        given["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
    return msgspec.structs.replace(model.defaults.sampling, **given)


def _resolve_settings(
    decoding: pb.DecodingParams, algorithm: Algorithm, model: ModelInfo
) -> DecodeSettings:
    given = _given(decoding)
    given |= {name: _BY_NUMBER[name][given[name]] for name in _BY_NUMBER.keys() & given.keys()}
    defaults = model.defaults.settings_of(algorithm, model.block_size)
    return msgspec.structs.replace(defaults, **given) if given else defaults


def _given(params: Message) -> dict[str, Any]:
    """The fields that are set; the rest take the model's defaults."""
    return {field.name: value for field, value in params.ListFields()}


async def encode_prompt(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    """The ids of the prompt. Raises `InvalidRequest` for one that the model's chat template does
    not take, and for text that becomes reserved tokens; `Unavailable` if tokenizer and model do
    not fit."""
    sent, parses_special = asked.sent, asked.sent.parse_special_tokens
    if parses_special:
        _check_special(asked, tokenizer)
    if sent.HasField("prompt"):
        ids = await tokenizer.encode(sent.prompt, parses_special=parses_special)
    elif asked.chat is not None:
        most_bytes = most_prompt_bytes(asked.model)
        try:
            ids = await tokenizer.encode_chat(
                asked.chat, most_bytes=most_bytes, parses_special=parses_special
            )
        except ChatTemplateError as error:
            why = f"the model's chat template refuses it: {shown(str(error), most=400)}"
            raise InvalidRequest.of("chat", why) from error
    else:
        return list(sent.prompt_token_ids.ids)
    if max(ids, default=0) >= asked.model.vocab_size:
        raise Unavailable(
            f"the router's tokenizer does not fit the model: it returned id {max(ids)}, but the "
            f"vocabulary has only {asked.model.vocab_size}",
            retryable=False,
        )
    if (mask := asked.model.mask_token_id) in ids and tokenizer.is_text(mask):
        field = "prompt" if asked.chat is None else "chat"
        raise InvalidRequest.of(field, f"expected text that does not become the mask id {mask}")
    return ids


def _check_special(asked: Asked, tokenizer: Tokenizer) -> None:
    """No token that is refused among ids may come in spelled."""
    findings = Findings()
    for name, text in _texts(asked):
        for part in tokenizer.special_tokens.cut(text):
            if not isinstance(part, str) and part.id in asked.refused_ids:
                what = f"the {asked.refused_ids[part.id]} token {shown(part.text)}"
                findings.add(name, "special tokens that a prompt may contain", what)
                break
    findings.raise_any()


def _texts(asked: Asked) -> Iterator[tuple[str, str]]:
    """Each of the client's strings, with its path in the request."""
    if asked.sent.HasField("prompt"):
        yield "prompt", asked.sent.prompt
    if asked.chat is not None:
        for at, message in enumerate(asked.chat.messages):
            name = f"chat.messages[{at}].{'json' if message.json else 'content'}"
            for text in strings_of(message.fields()):
                yield name, text
        for text in strings_of(asked.chat.template_arguments):
            yield "chat.template_arguments_json", text
