import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequestsRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchRequestsResponse(_message.Message):
    __slots__ = ("router", "num_running", "num_waiting", "requests", "num_tokens", "num_first_blocks", "first_block_seconds", "plan")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    router: str
    num_running: int
    num_waiting: int
    requests: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    num_tokens: int
    num_first_blocks: int
    first_block_seconds: float
    plan: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., num_first_blocks: _Optional[int] = ..., first_block_seconds: _Optional[float] = ..., plan: _Optional[_Iterable[str]] = ...) -> None: ...

class RunningRequest(_message.Message):
    __slots__ = ("name", "model", "state", "prefill_worker", "decode_worker", "attempt", "age", "prompt_tokens", "max_tokens", "num_tokens", "block_size", "blocks", "prompt", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    state: str
    prefill_worker: str
    decode_worker: str
    attempt: int
    age: _duration_pb2.Duration
    prompt_tokens: int
    max_tokens: int
    num_tokens: int
    block_size: int
    blocks: _containers.RepeatedCompositeFieldContainer[RunningBlock]
    prompt: str
    text: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempt: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[RunningBlock, _Mapping]]] = ..., prompt: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RunningBlock(_message.Message):
    __slots__ = ("token_offset", "num_tokens", "masks")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    num_tokens: int
    masks: bytes
    def __init__(self, token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., masks: _Optional[bytes] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plans",)
    PLANS_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[ModelPlan]
    def __init__(self, plans: _Optional[_Iterable[_Union[ModelPlan, _Mapping]]] = ...) -> None: ...

class ModelPlan(_message.Message):
    __slots__ = ("model", "times", "workload", "objectives", "mode", "roles", "desired", "lines", "kept")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    times: PlanTimes
    workload: PlanWorkload
    objectives: PlanObjectives
    mode: str
    roles: PlanSplit
    desired: PlanSplit
    lines: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., times: _Optional[_Union[PlanTimes, _Mapping]] = ..., workload: _Optional[_Union[PlanWorkload, _Mapping]] = ..., objectives: _Optional[_Union[PlanObjectives, _Mapping]] = ..., mode: _Optional[str] = ..., roles: _Optional[_Union[PlanSplit, _Mapping]] = ..., desired: _Optional[_Union[PlanSplit, _Mapping]] = ..., lines: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanTimes(_message.Message):
    __slots__ = ("prompts", "answers", "piece_tokens", "kv_bytes_per_token", "link_bytes_per_second")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PIECE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptTime]
    answers: _containers.RepeatedCompositeFieldContainer[AnswerPace]
    piece_tokens: float
    kv_bytes_per_token: float
    link_bytes_per_second: float
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptTime, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[AnswerPace, _Mapping]]] = ..., piece_tokens: _Optional[float] = ..., kv_bytes_per_token: _Optional[float] = ..., link_bytes_per_second: _Optional[float] = ...) -> None: ...

class PromptTime(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: float
    seconds: float
    def __init__(self, tokens: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class AnswerPace(_message.Message):
    __slots__ = ("batch", "tokens_per_second", "gap_s", "context")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    batch: float
    tokens_per_second: float
    gap_s: float
    context: float
    def __init__(self, batch: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., gap_s: _Optional[float] = ..., context: _Optional[float] = ...) -> None: ...

class PlanWorkload(_message.Message):
    __slots__ = ("rate", "prompt", "answer")
    RATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    rate: float
    prompt: float
    answer: float
    def __init__(self, rate: _Optional[float] = ..., prompt: _Optional[float] = ..., answer: _Optional[float] = ...) -> None: ...

class PlanObjectives(_message.Message):
    __slots__ = ("first_block_s", "gap_s", "gap_ratio")
    FIRST_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    GAP_RATIO_FIELD_NUMBER: _ClassVar[int]
    first_block_s: float
    gap_s: float
    gap_ratio: float
    def __init__(self, first_block_s: _Optional[float] = ..., gap_s: _Optional[float] = ..., gap_ratio: _Optional[float] = ...) -> None: ...

class PlanSplit(_message.Message):
    __slots__ = ("prefill", "decode", "share", "rate", "batch")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    share: float
    rate: float
    batch: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., share: _Optional[float] = ..., rate: _Optional[float] = ..., batch: _Optional[float] = ...) -> None: ...
