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
    __slots__ = ("router", "num_running", "num_waiting", "requests", "num_tokens", "num_first_blocks", "first_block_seconds")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    router: str
    num_running: int
    num_waiting: int
    requests: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    num_tokens: int
    num_first_blocks: int
    first_block_seconds: float
    def __init__(self, router: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., num_first_blocks: _Optional[int] = ..., first_block_seconds: _Optional[float] = ...) -> None: ...

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
