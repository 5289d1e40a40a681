"""The messages between a worker's front and its engine, and the interface of an engine core.

Tagged msgspec structs that mirror worker.proto; plain data, no I/O. Every message names its
attempt, except those of the process itself. Events that callers get have their names there as tags.

After `Abort` an engine only sends `AbortDone` for the attempt; after `Finished`, `Failed` and
`PromptPushed` it sends nothing more. A decode with a writer that ends before `Verified`, in any
way, keeps its pages in quarantine until `WriterGone`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec

from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.placement.records import Load, ModelInfo, Role

# The current work of an engine. It announces every phase except serving, because it may show no
# other sign for long.
Phase = Literal["loading", "capturing", "compiling", "serving"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The model's log-probabilities of one written token, as in `kernels.sampling_logprobs`."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class BlockState(msgspec.Struct, frozen=True, array_like=True):
    """One block in flight."""

    token_ids: tuple[int, ...]  # the mask id at positions that are not written
    masks: bytes  # one bit for each position, lowest bit first: set while it is a mask
    full: bool  # the block must progress every step
    denoise_count: int  # forwards that have denoised it
    # by position, if the request asks for them; None: no token
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The state with which an attempt continues exactly where another one stopped."""

    committed_token_ids: tuple[int, ...]
    frontier: tuple[BlockState, ...]


# Front to engine.


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The front's input to its new engine, on standard input as JSON."""

    endpoint: str  # of the front's socket
    incarnation: str
    front_pid: int
    config: msgspec.Raw  # the worker's config


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank's process, on standard input as JSON."""

    rank: int
    role: Role  # of its module
    home: str = ""  # private directory of the group's sockets and its meeting file
    leader: "RemoteLeader | None" = None  # instead of a home, if it is on another host
    store: "StoreAddress | None" = None  # if the ranks are on several hosts
    incarnation: str
    leader_pid: int  # of the process that starts it
    alive_fd: int | None  # the engine's listening socket, which the rank keeps open as well
    host_fd: int | None = None  # memory for kept KV that the ranks of this host may share
    config: msgspec.Raw


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The store at which ranks of several hosts meet."""

    host: str
    port: int
    meeting: str  # name of theirs
    interface: str  # of this host, for collectives


class RemoteLeader(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank of another host reaches its leader."""

    commands: str  # endpoint of this rank's commands
    answers: str  # endpoint
    key_seed: bytes  # of the keys that this incarnation of the group has


class StartPrefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Computes a prompt immediately; the push waits for the reservation."""

    attempt: AttemptId
    prompt_token_ids: tuple[int, ...]
    cache_salt: str = ""  # prompts with other salts share no KV with it
    progress: bool = False
    to_pool: bool = False  # the KV goes to the shared pool, and to a reservation only if that fails


class PushTo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The destination of a prefill's pages. Its attempt is the reservation's."""

    reservation: Reservation


class StartRehearsal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks a decode engine for free pages that a prefill worker writes once, to measure the link.

    Reserved follows, then Verified, which is the end: the pages are free again.
    """

    attempt: AttemptId
    writer: str  # incarnation of the prefill worker
    most_pages: int


class PushRehearsal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Makes a prefill engine push as many free pages as are reserved; PromptPushed follows."""

    reservation: Reservation
    in_groups: bool = False  # layers leave group by group, like a prompt's


class StartDecode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Requests one answer. All settings are resolved and within their bounds."""

    attempt: AttemptId
    prompt_token_ids: tuple[int, ...]
    stopping: Stopping
    sampling: Sampling
    settings: DecodeSettings
    writer: str | None  # incarnation of the prefill worker that will push; None prefills here
    in_pool: bool = False  # the shared pool has KV of the prompt, which is to be read
    drafts: bool = False
    progress: bool = False
    num_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = (
        None  # number of likeliest ids sent with log-probabilities; None sends none
    )
    resume: Resume | None = None
    group: str = ""  # whose members share the KV of an equal prompt; empty: none
    cache_salt: str = ""  # requests with other salts share no KV with it
    gap_s: float | None = None  # objective for the time between two commits; None: none


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ends an attempt, known or not, and refuses it from now on; AbortDone follows."""

    attempt: AttemptId


class WriterGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The writer no longer writes into this transfer's pages. They may be reused once nothing in
    transit to this process can arrive in them.
    """

    transfer_id: str
    # the writer's engine reported that all its writes have ended; otherwise it is gone
    has_drained: bool


class ReceiverGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine of a decode worker has ended: nothing more is pushed to this incarnation."""

    incarnation: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine process; handled by the process, never by its core."""


ToEngine = (
    StartPrefill
    | PushTo
    | StartDecode
    | StartRehearsal
    | PushRehearsal
    | Abort
    | WriterGone
    | ReceiverGone
    | Shutdown
)

# Engine to front.

FailureCode = Literal[
    "INVALID_ARGUMENT",  # this request can never succeed here
    "ALREADY_EXISTS",  # the attempt is running
    "FAILED_PRECONDITION",  # fingerprint or incarnation differ
    "RESOURCE_EXHAUSTED",  # no room now
    "ABORTED",  # the attempt had already ended
    "DEADLINE_EXCEEDED",  # the handoff's lease expired
    "UNAVAILABLE",  # the peer or the connector failed
    "DATA_LOSS",  # the digest or the set of pages is wrong
    "INTERNAL",  # a bug
]


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Weights are loaded and a forward has run: only heartbeats come before it."""

    model: ModelInfo
    fingerprint: tuple[tuple[str, str], ...]
    page_size: int
    total_pages: int
    page_bytes: int = 0  # over all ranks
    # The process listens on it as long as it lives, but never answers: once the port is closed,
    # nothing of this engine writes any more.
    engine_port: int = 0
    connector: str = ""  # by which its pages move


class StartupFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine could not start; the last message of such a process."""

    message: str
    permanent: bool  # the configuration or the checkpoint is wrong: starting again will not help


class Reserved(msgspec.Struct, frozen=True, tag="reservation", kw_only=True):
    """Pages are held. First event of a decode; without a writer it needs no address."""

    reservation: Reservation


class Verified(msgspec.Struct, frozen=True, tag="verified", kw_only=True):
    """The prompt's KV is complete and checked; no writer is left."""

    attempt: AttemptId
    bytes: int
    pages: int
    handoff_s: float  # since the last page was final and the reservation known, checks included
    compute_s: float = 0.0  # of this engine's forwards without company; 0 if it is not known
    cached_tokens: int = 0  # prompt tokens whose KV was there


class Committed(msgspec.Struct, frozen=True, tag="commit", kw_only=True):
    """Final tokens, append-only."""

    attempt: AttemptId
    token_offset: int  # position of the first one in the answer
    token_ids: tuple[int, ...]  # without a stop id
    forward_passes: int  # so far
    frontier: tuple[BlockState, ...]  # blocks in flight after this commit
    end_token_id: int | None = None  # the stop id after them, if it ends the answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if the request asks for them
    prompts_s: float = 0.0  # time since the last commit that went to prompts
    batch: int = 1  # answers in the step that ended with it


class Draft(msgspec.Struct, frozen=True, tag="draft", kw_only=True):
    """A block has begun or changed. Sent only if the request asks for drafts."""

    attempt: AttemptId
    token_offset: (
        int  # of the block's first token in the answer; negative before a ragged prompt's end
    )
    block: BlockState


class PromptProgress(msgspec.Struct, frozen=True, tag="progress", kw_only=True):
    """A part of a prompt is computed, but not the last. Sent only if the request asks for it."""

    attempt: AttemptId
    computed_tokens: int  # whose KV is there, known ones included


class Finished(msgspec.Struct, frozen=True, tag="finished", kw_only=True):
    """The end of an answer."""

    attempt: AttemptId
    stopped: bool  # a stop id ended it, not its length
    num_tokens: int
    forward_passes: int
    preemptions: int


class PrefillDone(msgspec.Struct, frozen=True, tag="computed", kw_only=True):
    """A prompt is computed."""

    attempt: AttemptId
    queue_s: float
    compute_s: float
    cached_tokens: int = 0  # prompt tokens whose KV was there
    in_pool: bool = False  # the shared pool has its whole units; PromptPushed follows


class PromptPushed(msgspec.Struct, frozen=True, tag="pushed", kw_only=True):
    """A prompt's pages have arrived: the end of a prefill."""

    attempt: AttemptId
    pages: int
    bytes: int  # without boundary state
    push_s: float  # since the last page was final and the reservation known, to the last answer
    transport: str = ""  # transport of the bytes, as in `kvtransfer.connector.Route`
    # pages of GPUs went over TCP or the host, although no flag asks for that
    is_fallback: bool = False
    moved_s: float = 0.0  # since the first page left, to the last answer


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The end of an attempt that failed."""

    attempt: AttemptId
    code: FailureCode
    message: str  # for the caller: expected and actual value, no internals
    retryable: bool  # another attempt may succeed
    retry_after_s: float | None = None
    field: str | None = None  # the bad fingerprint or request field


class AbortDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An abort has taken effect: the attempt does not read or write KV memory here any more."""

    attempt: AttemptId
    was_running: bool


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Shows that the thread that does the work runs. The only message before `Ready`."""

    loops: int  # turns of the engine's loop so far
    marks: int = 0  # parts of steps done so far, such as layers of forwards
    phase: Phase = "serving"
    load: Load
    dropped_lines: int = 0  # lines of its output without a reader, since the last beat


AttemptEvent = (
    Verified
    | Committed
    | Draft
    | PromptProgress
    | Finished
    | PrefillDone
    | PromptPushed
    | Failed
    | AbortDone
)
CoreEvent = Reserved | AttemptEvent  # events of a core; the process adds the rest
ToFront = Ready | StartupFailed | Heartbeat | CoreEvent


class EngineCore(Protocol):
    """The interface of an engine process's core; used from one thread only."""

    def handle(self, message: ToEngine) -> None:
        """Takes one message. Never blocks; a bad request emits `Failed` and raises nothing."""

    def step(self) -> bool:
        """Runs one iteration; False if there was nothing to do, or nothing yet."""

    def is_working(self) -> bool:
        """Whether a device still runs launched work, whose end wakes no thread."""

    def outbox(self) -> Sequence[CoreEvent]:
        """Returns the events since the last call, in order."""

    def load(self) -> Load:
        """Returns the load; cheap, called many times a second."""

    def close(self) -> None:
        """Stops the connector and frees the device."""
