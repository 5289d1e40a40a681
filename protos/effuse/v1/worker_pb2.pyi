from effuse.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptId(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    transfer_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "engine_port", "place")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PORT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    engine_port: int
    place: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., engine_port: _Optional[int] = ..., place: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "reservation")
    START_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    reservation: Reservation
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("attempt", "prompt_token_ids", "incarnation", "cache_salt", "progress", "to_pool")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TO_POOL_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptId
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    incarnation: str
    cache_salt: str
    progress: bool
    to_pool: bool
    def __init__(self, attempt: _Optional[_Union[AttemptId, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., incarnation: _Optional[str] = ..., cache_salt: _Optional[str] = ..., progress: _Optional[bool] = ..., to_pool: _Optional[bool] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("computed", "pushed", "progress")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    computed: PrefillComputed
    pushed: PrefillPushed
    progress: PrefillProgress
    def __init__(self, computed: _Optional[_Union[PrefillComputed, _Mapping]] = ..., pushed: _Optional[_Union[PrefillPushed, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class PrefillComputed(_message.Message):
    __slots__ = ("queue_s", "compute_s", "cached_tokens", "in_pool")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_POOL_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    compute_s: float
    cached_tokens: int
    in_pool: bool
    def __init__(self, queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., in_pool: _Optional[bool] = ...) -> None: ...

class PrefillPushed(_message.Message):
    __slots__ = ("pages", "bytes", "push_s")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSH_S_FIELD_NUMBER: _ClassVar[int]
    pages: int
    bytes: int
    push_s: float
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ..., push_s: _Optional[float] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("attempt", "incarnation", "connector", "num_pool_pages", "pages", "fingerprint", "lease_s", "digest_seed", "shards", "num_held", "num_written")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_POOL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_SEED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptId
    incarnation: str
    connector: str
    num_pool_pages: int
    pages: _containers.RepeatedCompositeFieldContainer[PageRef]
    fingerprint: _containers.RepeatedCompositeFieldContainer[FingerprintField]
    lease_s: float
    digest_seed: int
    shards: _containers.RepeatedCompositeFieldContainer[ReceivingShard]
    num_held: int
    num_written: int
    def __init__(self, attempt: _Optional[_Union[AttemptId, _Mapping]] = ..., incarnation: _Optional[str] = ..., connector: _Optional[str] = ..., num_pool_pages: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ..., fingerprint: _Optional[_Iterable[_Union[FingerprintField, _Mapping]]] = ..., lease_s: _Optional[float] = ..., digest_seed: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ReceivingShard, _Mapping]]] = ..., num_held: _Optional[int] = ..., num_written: _Optional[int] = ...) -> None: ...

class ReceivingShard(_message.Message):
    __slots__ = ("endpoint", "agent_name", "agent_metadata", "pool_address", "device_id", "memory_kind", "boot_id", "first_head", "end_head", "page_bytes", "context_rank", "context_degree", "first_group", "end_group")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    POOL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_HEAD_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_RANK_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DEGREE_FIELD_NUMBER: _ClassVar[int]
    FIRST_GROUP_FIELD_NUMBER: _ClassVar[int]
    END_GROUP_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    agent_name: str
    agent_metadata: bytes
    pool_address: int
    device_id: int
    memory_kind: str
    boot_id: str
    first_head: int
    end_head: int
    page_bytes: int
    context_rank: int
    context_degree: int
    first_group: int
    end_group: int
    def __init__(self, endpoint: _Optional[str] = ..., agent_name: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., pool_address: _Optional[int] = ..., device_id: _Optional[int] = ..., memory_kind: _Optional[str] = ..., boot_id: _Optional[str] = ..., first_head: _Optional[int] = ..., end_head: _Optional[int] = ..., page_bytes: _Optional[int] = ..., context_rank: _Optional[int] = ..., context_degree: _Optional[int] = ..., first_group: _Optional[int] = ..., end_group: _Optional[int] = ...) -> None: ...

class PageRef(_message.Message):
    __slots__ = ("page_id", "generation")
    PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    page_id: int
    generation: int
    def __init__(self, page_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class FingerprintField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("attempt", "incarnation", "prompt_token_ids", "max_tokens", "stop_token_ids", "sampling", "settings", "remote", "local", "drafts", "resume", "min_tokens", "num_logprobs", "group", "gap_s", "cache_salt", "progress")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptId
    incarnation: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: DecodeSampling
    settings: DecodeSettings
    remote: WorkerRef
    local: LocalPrefill
    drafts: bool
    resume: Resume
    min_tokens: int
    num_logprobs: int
    group: str
    gap_s: float
    cache_salt: str
    progress: bool
    def __init__(self, attempt: _Optional[_Union[AttemptId, _Mapping]] = ..., incarnation: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[DecodeSampling, _Mapping]] = ..., settings: _Optional[_Union[DecodeSettings, _Mapping]] = ..., remote: _Optional[_Union[WorkerRef, _Mapping]] = ..., local: _Optional[_Union[LocalPrefill, _Mapping]] = ..., drafts: _Optional[bool] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., group: _Optional[str] = ..., gap_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., progress: _Optional[bool] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("in_pool",)
    IN_POOL_FIELD_NUMBER: _ClassVar[int]
    in_pool: bool
    def __init__(self, in_pool: _Optional[bool] = ...) -> None: ...

class DecodeSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "answer_index")
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
    ANSWER_INDEX_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    answer_index: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., answer_index: _Optional[int] = ...) -> None: ...

class DecodeSettings(_message.Message):
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
    algorithm: str
    window: int
    confidence_threshold: float
    block_add_threshold: float
    full_activation_threshold: float
    score: str
    remasking: str
    denoising_steps: int
    block_length: int
    steps: int
    cfg_scale: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    alg: str
    eps: float
    alg_temp: float
    cache: str
    entropy_bound: float
    editing_threshold: float
    max_post_steps: int
    factor: float
    def __init__(self, algorithm: _Optional[str] = ..., window: _Optional[int] = ..., confidence_threshold: _Optional[float] = ..., block_add_threshold: _Optional[float] = ..., full_activation_threshold: _Optional[float] = ..., score: _Optional[str] = ..., remasking: _Optional[str] = ..., denoising_steps: _Optional[int] = ..., block_length: _Optional[int] = ..., steps: _Optional[int] = ..., cfg_scale: _Optional[float] = ..., logits_eos_inf: _Optional[bool] = ..., confidence_eos_eot_inf: _Optional[bool] = ..., alg: _Optional[str] = ..., eps: _Optional[float] = ..., alg_temp: _Optional[float] = ..., cache: _Optional[str] = ..., entropy_bound: _Optional[float] = ..., editing_threshold: _Optional[float] = ..., max_post_steps: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("committed_token_ids", "frontier")
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    frontier: _containers.RepeatedCompositeFieldContainer[BlockState]
    def __init__(self, committed_token_ids: _Optional[_Iterable[int]] = ..., frontier: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("token_ids", "masks", "full", "denoise_count", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    DENOISE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    masks: bytes
    full: bool
    denoise_count: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., masks: _Optional[bytes] = ..., full: _Optional[bool] = ..., denoise_count: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("reservation", "verified", "commit", "draft", "finished", "progress", "then")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    verified: PrefillVerified
    commit: DecodeCommit
    draft: DecodeDraft
    finished: DecodeFinished
    progress: PrefillProgress
    then: _containers.RepeatedCompositeFieldContainer[DecodeResponse]
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., verified: _Optional[_Union[PrefillVerified, _Mapping]] = ..., commit: _Optional[_Union[DecodeCommit, _Mapping]] = ..., draft: _Optional[_Union[DecodeDraft, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., then: _Optional[_Iterable[_Union[DecodeResponse, _Mapping]]] = ...) -> None: ...

class PrefillVerified(_message.Message):
    __slots__ = ("bytes", "pages", "handoff_s", "compute_s", "cached_tokens")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    pages: int
    handoff_s: float
    compute_s: float
    cached_tokens: int
    def __init__(self, bytes: _Optional[int] = ..., pages: _Optional[int] = ..., handoff_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeCommit(_message.Message):
    __slots__ = ("token_offset", "token_ids", "forward_passes", "frontier", "end_token_id", "logprobs", "prompts_s", "batch")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    forward_passes: int
    frontier: _containers.RepeatedCompositeFieldContainer[BlockState]
    end_token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    prompts_s: float
    batch: int
    def __init__(self, token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., forward_passes: _Optional[int] = ..., frontier: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ..., end_token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., prompts_s: _Optional[float] = ..., batch: _Optional[int] = ...) -> None: ...

class DecodeDraft(_message.Message):
    __slots__ = ("token_offset", "block")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    block: BlockState
    def __init__(self, token_offset: _Optional[int] = ..., block: _Optional[_Union[BlockState, _Mapping]] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("stopped", "num_tokens", "forward_passes", "preemptions")
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    num_tokens: int
    forward_passes: int
    preemptions: int
    def __init__(self, stopped: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., forward_passes: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class RehearseRequest(_message.Message):
    __slots__ = ("attempt", "incarnation", "writer", "most_pages")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    MOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptId
    incarnation: str
    writer: WorkerRef
    most_pages: int
    def __init__(self, attempt: _Optional[_Union[AttemptId, _Mapping]] = ..., incarnation: _Optional[str] = ..., writer: _Optional[_Union[WorkerRef, _Mapping]] = ..., most_pages: _Optional[int] = ...) -> None: ...

class RehearseResponse(_message.Message):
    __slots__ = ("reservation", "verified")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    verified: PrefillVerified
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., verified: _Optional[_Union[PrefillVerified, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("attempt", "reason", "incarnation")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptId
    reason: str
    incarnation: str
    def __init__(self, attempt: _Optional[_Union[AttemptId, _Mapping]] = ..., reason: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("incarnation", "was_running", "drained", "life_is_over")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LIFE_IS_OVER_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    was_running: bool
    drained: bool
    life_is_over: bool
    def __init__(self, incarnation: _Optional[str] = ..., was_running: _Optional[bool] = ..., drained: _Optional[bool] = ..., life_is_over: _Optional[bool] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("worker", "role", "running", "waiting", "total_pages", "free_pages", "quarantined_pages", "queued_tokens", "blocks_left", "steps", "draining", "tasks", "preemptions", "kv_bytes", "leaving")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEFT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    role: str
    running: int
    waiting: int
    total_pages: int
    free_pages: int
    quarantined_pages: int
    queued_tokens: int
    blocks_left: int
    steps: int
    draining: bool
    tasks: int
    preemptions: int
    kv_bytes: int
    leaving: int
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., role: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., blocks_left: _Optional[int] = ..., steps: _Optional[int] = ..., draining: _Optional[bool] = ..., tasks: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., leaving: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "hand_over_s", "planned")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_S_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    role: str
    hand_over_s: float
    planned: bool
    def __init__(self, role: _Optional[str] = ..., hand_over_s: _Optional[float] = ..., planned: _Optional[bool] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("role", "leaving")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    role: str
    leaving: int
    def __init__(self, role: _Optional[str] = ..., leaving: _Optional[int] = ...) -> None: ...
