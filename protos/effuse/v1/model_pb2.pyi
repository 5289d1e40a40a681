import datetime

from effuse.v1 import generation_pb2 as _generation_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_BOTH: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
    WORKER_STATE_UNREACHABLE: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_BOTH: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_LOST: WorkerState
WORKER_STATE_UNREACHABLE: WorkerState

class Model(_message.Message):
    __slots__ = ("name", "architecture", "block_size", "max_model_len", "vocab_size", "mask_token_id", "eos_token_ids", "default_algorithm", "decode_workers", "prefill_workers", "defaults", "deterministic", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    block_size: int
    max_model_len: int
    vocab_size: int
    mask_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_algorithm: _generation_pb2.Algorithm
    decode_workers: int
    prefill_workers: int
    defaults: ModelDefaults
    deterministic: bool
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_algorithm: _Optional[_Union[_generation_pb2.Algorithm, str]] = ..., decode_workers: _Optional[int] = ..., prefill_workers: _Optional[int] = ..., defaults: _Optional[_Union[ModelDefaults, _Mapping]] = ..., deterministic: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class ModelDefaults(_message.Message):
    __slots__ = ("sampling", "decoding", "max_tokens", "sources")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sampling: _generation_pb2.SamplingParams
    decoding: _generation_pb2.DecodingParams
    max_tokens: int
    sources: _containers.RepeatedCompositeFieldContainer[DefaultSource]
    def __init__(self, sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., decoding: _Optional[_Union[_generation_pb2.DecodingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[DefaultSource, _Mapping]]] = ...) -> None: ...

class DefaultSource(_message.Message):
    __slots__ = ("knob", "source")
    KNOB_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    knob: str
    source: str
    def __init__(self, knob: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    next_page_token: str
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "role", "model", "address", "state", "incarnation", "page_size", "total_pages", "free_pages", "quarantined_pages", "max_num_seqs", "running", "waiting", "queued_tokens", "blocks_left", "steps", "preemptions", "kv_bytes", "links", "min_handoff_gbps", "quarantines", "reserved_pages", "receiving_pages", "step_requests", "step_tokens", "max_num_batched_tokens", "routed", "ranks", "may_change_role", "num_leaving", "role_is_pinned", "paged_waste", "contiguous_waste", "prefix_units", "prefix_hits", "context_ranks", "stages")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEFT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    MIN_HANDOFF_GBPS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MAY_CHANGE_ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAVING_FIELD_NUMBER: _ClassVar[int]
    ROLE_IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PAGED_WASTE_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_WASTE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_UNITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    model: str
    address: str
    state: WorkerState
    incarnation: str
    page_size: int
    total_pages: int
    free_pages: int
    quarantined_pages: int
    max_num_seqs: int
    running: int
    waiting: int
    queued_tokens: int
    blocks_left: int
    steps: int
    preemptions: int
    kv_bytes: int
    links: _containers.RepeatedCompositeFieldContainer[WorkerLink]
    min_handoff_gbps: float
    quarantines: _containers.RepeatedCompositeFieldContainer[WorkerQuarantine]
    reserved_pages: int
    receiving_pages: int
    step_requests: int
    step_tokens: int
    max_num_batched_tokens: int
    routed: int
    ranks: int
    may_change_role: bool
    num_leaving: int
    role_is_pinned: bool
    paged_waste: float
    contiguous_waste: float
    prefix_units: int
    prefix_hits: int
    context_ranks: int
    stages: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., incarnation: _Optional[str] = ..., page_size: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., blocks_left: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., links: _Optional[_Iterable[_Union[WorkerLink, _Mapping]]] = ..., min_handoff_gbps: _Optional[float] = ..., quarantines: _Optional[_Iterable[_Union[WorkerQuarantine, _Mapping]]] = ..., reserved_pages: _Optional[int] = ..., receiving_pages: _Optional[int] = ..., step_requests: _Optional[int] = ..., step_tokens: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., routed: _Optional[int] = ..., ranks: _Optional[int] = ..., may_change_role: _Optional[bool] = ..., num_leaving: _Optional[int] = ..., role_is_pinned: _Optional[bool] = ..., paged_waste: _Optional[float] = ..., contiguous_waste: _Optional[float] = ..., prefix_units: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., context_ranks: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class WorkerQuarantine(_message.Message):
    __slots__ = ("writer", "pages", "age")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    writer: str
    pages: int
    age: _duration_pb2.Duration
    def __init__(self, writer: _Optional[str] = ..., pages: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WorkerLink(_message.Message):
    __slots__ = ("peer", "peer_incarnation", "transport", "gigabytes_per_second", "refused")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GIGABYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    peer_incarnation: str
    transport: str
    gigabytes_per_second: float
    refused: bool
    def __init__(self, peer: _Optional[str] = ..., peer_incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., gigabytes_per_second: _Optional[float] = ..., refused: _Optional[bool] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "prompt", "chat", "parse_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    chat: _generation_pb2.ChatInput
    parse_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[_generation_pb2.ChatInput, _Mapping]] = ..., parse_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
