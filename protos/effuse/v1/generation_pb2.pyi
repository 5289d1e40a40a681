import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]

class Algorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALGORITHM_UNSPECIFIED: _ClassVar[Algorithm]
    ALGORITHM_D2F: _ClassVar[Algorithm]
    ALGORITHM_BLOCK_DIFFUSION: _ClassVar[Algorithm]
    ALGORITHM_LLADA: _ClassVar[Algorithm]
    ALGORITHM_DREAM: _ClassVar[Algorithm]
    ALGORITHM_FAST_DLLM: _ClassVar[Algorithm]
    ALGORITHM_FAST_DLLM_V2: _ClassVar[Algorithm]

class Remasking(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMASKING_UNSPECIFIED: _ClassVar[Remasking]
    REMASKING_LOW_CONFIDENCE_DYNAMIC: _ClassVar[Remasking]
    REMASKING_LOW_CONFIDENCE_STATIC: _ClassVar[Remasking]
    REMASKING_SEQUENTIAL: _ClassVar[Remasking]
    REMASKING_ENTROPY_BOUNDED: _ClassVar[Remasking]
    REMASKING_LOW_CONFIDENCE: _ClassVar[Remasking]
    REMASKING_RANDOM: _ClassVar[Remasking]

class Score(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_UNSPECIFIED: _ClassVar[Score]
    SCORE_CONFIDENCE: _ClassVar[Score]
    SCORE_MARGIN: _ClassVar[Score]
    SCORE_NEG_ENTROPY: _ClassVar[Score]

class Alg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALG_UNSPECIFIED: _ClassVar[Alg]
    ALG_ORIGIN: _ClassVar[Alg]
    ALG_MASKGIT_PLUS: _ClassVar[Alg]
    ALG_TOPK_MARGIN: _ClassVar[Alg]
    ALG_ENTROPY: _ClassVar[Alg]

class Cache(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_UNSPECIFIED: _ClassVar[Cache]
    CACHE_NONE: _ClassVar[Cache]
    CACHE_PREFIX: _ClassVar[Cache]
    CACHE_DUAL: _ClassVar[Cache]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_LOW: Priority
PRIORITY_NORMAL: Priority
PRIORITY_HIGH: Priority
ALGORITHM_UNSPECIFIED: Algorithm
ALGORITHM_D2F: Algorithm
ALGORITHM_BLOCK_DIFFUSION: Algorithm
ALGORITHM_LLADA: Algorithm
ALGORITHM_DREAM: Algorithm
ALGORITHM_FAST_DLLM: Algorithm
ALGORITHM_FAST_DLLM_V2: Algorithm
REMASKING_UNSPECIFIED: Remasking
REMASKING_LOW_CONFIDENCE_DYNAMIC: Remasking
REMASKING_LOW_CONFIDENCE_STATIC: Remasking
REMASKING_SEQUENTIAL: Remasking
REMASKING_ENTROPY_BOUNDED: Remasking
REMASKING_LOW_CONFIDENCE: Remasking
REMASKING_RANDOM: Remasking
SCORE_UNSPECIFIED: Score
SCORE_CONFIDENCE: Score
SCORE_MARGIN: Score
SCORE_NEG_ENTROPY: Score
ALG_UNSPECIFIED: Alg
ALG_ORIGIN: Alg
ALG_MASKGIT_PLUS: Alg
ALG_TOPK_MARGIN: Alg
ALG_ENTROPY: Alg
CACHE_UNSPECIFIED: Cache
CACHE_NONE: Cache
CACHE_PREFIX: Cache
CACHE_DUAL: Cache
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
REQUEST_STATE_CANCELLED: RequestState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "prompt_token_ids", "chat", "sampling", "stopping", "decoding", "output", "parse_special_tokens", "priority", "n", "objectives", "request_class")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    prompt_token_ids: TokenIds
    chat: ChatInput
    sampling: SamplingParams
    stopping: StoppingParams
    decoding: DecodingParams
    output: OutputOptions
    parse_special_tokens: bool
    priority: Priority
    n: int
    objectives: Objectives
    request_class: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., decoding: _Optional[_Union[DecodingParams, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., parse_special_tokens: _Optional[bool] = ..., priority: _Optional[_Union[Priority, str]] = ..., n: _Optional[int] = ..., objectives: _Optional[_Union[Objectives, _Mapping]] = ..., request_class: _Optional[str] = ...) -> None: ...

class Objectives(_message.Message):
    __slots__ = ("first_block_within", "gap_within")
    FIRST_BLOCK_WITHIN_FIELD_NUMBER: _ClassVar[int]
    GAP_WITHIN_FIELD_NUMBER: _ClassVar[int]
    first_block_within: float
    gap_within: float
    def __init__(self, first_block_within: _Optional[float] = ..., gap_within: _Optional[float] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "template_arguments", "add_generation_prompt", "continue_last_message", "template_arguments_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_arguments: _struct_pb2.Struct
    add_generation_prompt: bool
    continue_last_message: bool
    template_arguments_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_arguments: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_last_message: _Optional[bool] = ..., template_arguments_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "min_tokens")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    def __init__(self, max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class DecodingParams(_message.Message):
    __slots__ = ("algorithm", "window", "confidence_threshold", "block_add_threshold", "full_activation_threshold", "score", "remasking", "denoising_steps", "block_length", "steps", "cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf", "alg", "eps", "alg_temp", "cache", "entropy_bound", "editing_threshold", "max_post_steps", "factor")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ADD_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    FULL_ACTIVATION_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REMASKING_FIELD_NUMBER: _ClassVar[int]
    DENOISING_STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CFG_SCALE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_EOS_INF_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_EOS_EOT_INF_FIELD_NUMBER: _ClassVar[int]
    ALG_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    ALG_TEMP_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_BOUND_FIELD_NUMBER: _ClassVar[int]
    EDITING_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_POST_STEPS_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    algorithm: Algorithm
    window: int
    confidence_threshold: float
    block_add_threshold: float
    full_activation_threshold: float
    score: Score
    remasking: Remasking
    denoising_steps: int
    block_length: int
    steps: int
    cfg_scale: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    alg: Alg
    eps: float
    alg_temp: float
    cache: Cache
    entropy_bound: float
    editing_threshold: float
    max_post_steps: int
    factor: float
    def __init__(self, algorithm: _Optional[_Union[Algorithm, str]] = ..., window: _Optional[int] = ..., confidence_threshold: _Optional[float] = ..., block_add_threshold: _Optional[float] = ..., full_activation_threshold: _Optional[float] = ..., score: _Optional[_Union[Score, str]] = ..., remasking: _Optional[_Union[Remasking, str]] = ..., denoising_steps: _Optional[int] = ..., block_length: _Optional[int] = ..., steps: _Optional[int] = ..., cfg_scale: _Optional[float] = ..., logits_eos_inf: _Optional[bool] = ..., confidence_eos_eot_inf: _Optional[bool] = ..., alg: _Optional[_Union[Alg, str]] = ..., eps: _Optional[float] = ..., alg_temp: _Optional[float] = ..., cache: _Optional[_Union[Cache, str]] = ..., entropy_bound: _Optional[float] = ..., editing_threshold: _Optional[float] = ..., max_post_steps: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("token_ids", "drafts", "logprobs", "echo", "prompt_progress")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bool
    drafts: bool
    logprobs: int
    echo: bool
    prompt_progress: bool
    def __init__(self, token_ids: _Optional[bool] = ..., drafts: _Optional[bool] = ..., logprobs: _Optional[int] = ..., echo: _Optional[bool] = ..., prompt_progress: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptEcho(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class GenerationStats(_message.Message):
    __slots__ = ("queue_duration", "prefill_duration", "handoff_duration", "time_to_first_block", "total_duration", "forward_passes", "tokens_per_forward", "kv_bytes", "kv_pages", "connector", "prefill_worker", "decode_worker", "preemptions", "cached_prompt_tokens")
    QUEUE_DURATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DURATION_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_DURATION_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DURATION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_FORWARD_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_duration: _duration_pb2.Duration
    prefill_duration: _duration_pb2.Duration
    handoff_duration: _duration_pb2.Duration
    time_to_first_block: _duration_pb2.Duration
    total_duration: _duration_pb2.Duration
    forward_passes: int
    tokens_per_forward: float
    kv_bytes: int
    kv_pages: int
    connector: str
    prefill_worker: str
    decode_worker: str
    preemptions: int
    cached_prompt_tokens: int
    def __init__(self, queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., handoff_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_block: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forward_passes: _Optional[int] = ..., tokens_per_forward: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., kv_pages: _Optional[int] = ..., connector: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., preemptions: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "finish_reason", "usage", "stats", "model", "seed", "end_token_id", "stop_string", "deterministic", "logprobs", "echo", "others")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    usage: Usage
    stats: GenerationStats
    model: str
    seed: int
    end_token_id: int
    stop_string: str
    deterministic: bool
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    echo: PromptEcho
    others: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., end_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., deterministic: _Optional[bool] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., echo: _Optional[_Union[PromptEcho, _Mapping]] = ..., others: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("request_id", "commit", "draft", "finished", "echo", "progress", "answer_index", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    commit: BlockCommit
    draft: BlockDraft
    finished: Finished
    echo: PromptEcho
    progress: PromptProgress
    answer_index: int
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., commit: _Optional[_Union[BlockCommit, _Mapping]] = ..., draft: _Optional[_Union[BlockDraft, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., echo: _Optional[_Union[PromptEcho, _Mapping]] = ..., progress: _Optional[_Union[PromptProgress, _Mapping]] = ..., answer_index: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class PromptProgress(_message.Message):
    __slots__ = ("computed_tokens", "prompt_tokens")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    prompt_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class BlockCommit(_message.Message):
    __slots__ = ("token_offset", "num_tokens", "text", "token_ids", "forward_passes", "logprobs")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    num_tokens: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    forward_passes: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., forward_passes: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class BlockDraft(_message.Message):
    __slots__ = ("token_offset", "text", "num_masks")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_MASKS_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    text: str
    num_masks: int
    def __init__(self, token_offset: _Optional[int] = ..., text: _Optional[str] = ..., num_masks: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "usage", "stats", "model", "seed", "end_token_id", "stop_string", "deterministic")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    usage: Usage
    stats: GenerationStats
    model: str
    seed: int
    end_token_id: int
    stop_string: str
    deterministic: bool
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., end_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., deterministic: _Optional[bool] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetRequestResponse(_message.Message):
    __slots__ = ("request_id", "state", "attempt", "prefill_worker", "decode_worker", "status", "router", "answer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    attempt: int
    prefill_worker: str
    decode_worker: str
    status: str
    router: str
    answer: GenerateResponse
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., attempt: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., status: _Optional[str] = ..., router: _Optional[str] = ..., answer: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("request_id", "was_running", "state", "router")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    was_running: bool
    state: RequestState
    router: str
    def __init__(self, request_id: _Optional[str] = ..., was_running: _Optional[bool] = ..., state: _Optional[_Union[RequestState, str]] = ..., router: _Optional[str] = ...) -> None: ...
