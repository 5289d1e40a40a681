"""A small tokenizer, model and workers' records: the basis of the fakes."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from effuse.config.decoding import DecodeSettings, DecodingDefaults
from effuse.placement.records import Capacity, Load, ModelInfo, Role, WorkerRecord
from effuse.router.chat_template import ChatTemplate
from effuse.router.request import AnswerState, Request
from effuse.router.tokenizer import AnswerText, Tokenizer
from effuse.router.validation import Asked, validate
from effuse.v1 import generation_pb2 as pb

EOS, MASK, PAD, PROMPT, ANSWER, WORD = 256, 257, 258, 259, 260, 261
VOCAB_SIZE, BLOCK_SIZE, MAX_MODEL_LEN = 264, 4, 256


def chat_template() -> ChatTemplate:
    """Each message as a separate prompt; it has no system messages."""
    source = (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ '<|prompt|>' + message.content + '<|answer|>' }}{% endfor %}"
        "{% if loud is defined %}{{ loud }}{% endif %}"
    )
    return ChatTemplate({"default": source}, {}, origin="chat_template.jinja")


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, five special tokens, and one word of several bytes."""
    names = ("<|eos|>", "<|mask|>", "<|pad|>", "<|prompt|>", "<|answer|>")
    ordered = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *names, "Ġthree"]
    vocabulary = {token: index for index, token in enumerate(ordered)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="<|prompt|> $A <|answer|>",
        special_tokens=[("<|prompt|>", PROMPT), ("<|answer|>", ANSWER)],
    )
    return backend


def ids_of(text: str) -> list[int]:
    """The ids of a text without the template's."""
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def model_info(name: str = "fake") -> ModelInfo:
    """A small model."""
    return ModelInfo(
        name=name,
        architecture="sdar",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        prompt_attention="bidirectional",
        defaults=DecodingDefaults(
            settings=DecodeSettings(algorithm="d2f", denoising_steps=BLOCK_SIZE)
        ),
    )


def worker_record(
    worker_id: str,
    role: Role,
    *,
    address: str = "127.0.0.1:1",
    incarnation: str = "1",
    fingerprint: str = "same",
    load: Load | None = None,
    model: str = "fake",
) -> WorkerRecord:
    """A worker that is ready."""
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=address,
        incarnation=incarnation,
        state="ready",
        fingerprint=(("weights", fingerprint),),
        model=model_info(model),
        capacity=Capacity(
            total_pages=max(256, MAX_MODEL_LEN // 16),
            page_size=16,
            max_num_seqs=64,
            max_num_batched_tokens=512,
        ),
        load=load or Load(total_pages=256, free_pages=256),
    )


def request_of(request_id: str = "r", **fields: object) -> Request:
    """A request that was accepted."""
    state = {
        name: fields.pop(name) for name in ("state", "token_ids", "frontier") if name in fields
    }
    asked, tokenizer = _asked(), _tokenizer()
    return Request(
        id=request_id,
        asked=asked,
        arrived=0.0,
        limit_s=60.0,
        deadline=60.0,
        answer=AnswerState(text=AnswerText(tokenizer, asked.sent.stopping.stop), **state),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


@cache
def _asked() -> Asked:
    return validate(pb.GenerateRequest(prompt="how many?"), model_info(), is_stream=True)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())
