"""KServe's inference service (Open Inference Protocol v2), for clients that know tensors.

A prompt is the one element of the tensor `text_input`, settings are parameters by the names of
`effuse.Params`, and an answer is `text_output` with `finish_reason`, with one element for each of
`n` answers. Tensors are raw if the request's are."""

import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final, get_args, get_type_hints

import msgspec

from effuse.client.answer import FINISH_REASONS
from effuse.client.params import Params, make_request
from effuse.compat import kserve_pb2 as kserve
from effuse.compat import kserve_pb2_grpc
from effuse.protos.errors import Bug, Cancelled, EffuseError, NotFound
from effuse.protos.rpc import Context
from effuse.router.client import AnswerStream, ClientGone, Translate
from effuse.router.findings import Findings, check_model_name, naming, shown
from effuse.router.handler import Serving
from effuse.router.request import Request
from effuse.v1 import generation_pb2 as pb

VERSION: Final = "1"
INPUT: Final = "text_input"
TEXT: Final = "text_output"
REASON: Final = "finish_reason"
INDEX: Final = "answer_index"
FINAL: Final = "triton_final_response"
_ASKS_FOR_FINAL: Final = "triton_enable_empty_final_response"  # the end is always sent
_OF_HTTP: Final = {"binary_data_size", "binary_data"}
"""Of tensors that are bytes behind JSON. KServe's own client sets them for gRPC, too."""
_IS_TEXT: Final = ("content_type", "str")  # of a tensor, by MLServer's codec
# The model's name, settings that no parameter can hold, and results that no tensor holds.
_ELSEWHERE: Final = {"model", "logit_bias", "stop_token_ids", "logprobs", "echo"}
_SETTINGS: Final[Mapping[str, Any]] = {
    name: kind for name, kind in get_type_hints(Params).items() if name not in _ELSEWHERE
}


def request_of(asked: kserve.ModelInferRequest) -> pb.GenerateRequest:
    """The request that a client means; raises `InvalidRequest` with all that is wrong with its
    form, and `NotFound`. Its id is not taken over, as others may use the same."""
    check_version(asked.model_version)
    findings = Findings()
    prompt = _prompt_of(asked, findings)
    settings = _settings_of(asked.parameters, findings)
    for at, output in enumerate(asked.outputs):
        if findings.is_full:
            findings.num_more += len(asked.outputs) - at  # none of which is looked at
            break
        if output.name not in (TEXT, REASON):
            findings.add(f"outputs[{at}].name", f"{TEXT} or {REASON}", shown(output.name))
        _check_plain(f"outputs[{at}]", output.parameters, findings)
    settings["model"] = asked.model_name or None
    return make_request(prompt, findings.params(settings, _parameter))


def _parameter(name: str) -> str:
    return f"parameters[{shown(name)}]"


def _path_of(field: str) -> str:
    """The path in a client's message of a field of the request that it means."""
    name = field.rpartition(".")[2].partition("[")[0]
    elsewhere = {"prompt": "inputs[0]", "model": "model_name"}
    return _parameter(name) if name in _SETTINGS else elsewhere.get(field, field)


def check_version(version: str) -> None:
    """Raises `NotFound` for a version of a model that is not the only one."""
    if version not in ("", VERSION):
        raise NotFound(f"the only version of a model is {VERSION}, got {shown(version)}")


def answer_of(
    asked: kserve.ModelInferRequest, answer: pb.GenerateResponse
) -> kserve.ModelInferResponse:
    """An answer with its reason and token counts; of several, an element each and the sums."""
    answers = (answer, *answer.others)
    return _response(asked, answer.model, [one.text for one in answers], answers)


def pieces_of(asked: kserve.ModelInferRequest, request: Request) -> Translate:
    """Translates the events of an answer, or of several, to new text and ends."""
    num_left = request.asked.num_answers
    sends_text = not asked.outputs or any(one.name == TEXT for one in asked.outputs)

    def translate(event: pb.GenerateStreamResponse) -> kserve.ModelStreamInferResponse | None:
        nonlocal num_left
        num_left -= event.HasField("finished")
        if not ((sends_text and event.commit.text) or event.HasField("finished")):
            return None
        return piece_of(asked, event, request.asked.model.name, is_last=not num_left)

    return translate


def piece_of(
    asked: kserve.ModelInferRequest,
    event: pb.GenerateStreamResponse,
    model_name: str,
    *,
    is_last: bool = False,
) -> kserve.ModelStreamInferResponse:
    """A piece of an answer, or its end, in a stream. It states whether it is the last one of all,
    and if several answers were asked for, which one it belongs to."""
    ends = (event.finished,) if event.HasField("finished") else ()
    response = _response(asked, model_name, [event.commit.text], ends)
    response.parameters[FINAL].bool_param = is_last
    if "n" in asked.parameters:
        response.parameters[INDEX].int64_param = event.answer_index
    return kserve.ModelStreamInferResponse(infer_response=response)


def _response(
    asked: kserve.ModelInferRequest,
    model_name: str,
    texts: Sequence[str],
    ends: Sequence[pb.GenerateResponse | pb.Finished],
) -> kserve.ModelInferResponse:
    response = kserve.ModelInferResponse(model_name=model_name, model_version=VERSION, id=asked.id)
    tensors = {TEXT: texts}
    if ends:
        tensors[REASON] = [FINISH_REASONS[end.finish_reason] for end in ends]
        for name in ("prompt_tokens", "completion_tokens"):
            counts = (getattr(end.usage, name) for end in ends)
            response.parameters[name].int64_param = sum(counts)
    wanted = {output.name for output in asked.outputs} or tensors.keys()
    is_raw = bool(asked.raw_input_contents)
    for name, values in tensors.items():
        if name not in wanted:
            continue
        elements = [one.encode() for one in values]
        tensor = response.outputs.add(name=name, datatype="BYTES", shape=[len(elements)])
        if is_raw:
            packed = (struct.pack("<I", len(element)) + element for element in elements)
            response.raw_output_contents.append(b"".join(packed))
        else:
            tensor.contents.bytes_contents.extend(elements)
    return response


def describe_tensors(name: str) -> kserve.ModelMetadataResponse:
    tensor = kserve.ModelMetadataResponse.TensorMetadata
    return kserve.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform="effuse",
        inputs=[tensor(name=INPUT, datatype="BYTES", shape=[1])],
        outputs=[tensor(name=one, datatype="BYTES", shape=[-1]) for one in (TEXT, REASON)],
    )


def _prompt_of(asked: kserve.ModelInferRequest, findings: Findings) -> str:
    """The text of the one input; empty if it is wrong, which is among the findings then."""
    names = [tensor.name for tensor in asked.inputs]
    if names != [INPUT]:
        found = ", ".join(shown(name) for name in names[:4]) or "none"
        findings.add("inputs", f"one tensor, {INPUT}", found)
        return ""
    (tensor,) = asked.inputs
    if tensor.datatype != "BYTES":
        findings.add("inputs[0].datatype", "BYTES", shown(tensor.datatype))
    if not 1 <= len(tensor.shape) <= 2 or set(tensor.shape) != {1}:
        findings.add("inputs[0].shape", "[1] or [1, 1]", list(tensor.shape[:4]))
    _check_plain("inputs[0]", tensor.parameters, findings)
    raw, contents = asked.raw_input_contents, tensor.contents.bytes_contents
    if raw and contents:
        findings.add("raw_input_contents", "one of raw_input_contents and contents", "both")
        return ""
    elements = [_unpack(raw[0])] if len(raw) == 1 else list(contents)
    if len(raw) > 1 or len(elements) != 1 or elements[0] is None:
        where = "raw_input_contents" if raw else "inputs[0].contents.bytes_contents"
        form = "one element of 4 bytes with its length and its text" if raw else "one element"
        findings.add(where, form, "another length" if len(raw) == 1 else len(raw) or len(contents))
        return ""
    try:
        return elements[0].decode()
    except UnicodeDecodeError:
        findings.add("inputs[0]", "UTF-8", "other bytes")
        return ""


def _check_plain(
    where: str, parameters: Mapping[str, kserve.InferParameter], findings: Findings
) -> None:
    """A tensor without parameters of its own, by which others mean memory that both can see."""
    given = ((name, value.string_param) for name, value in parameters.items())
    if strange := [one[0] for one in given if one[0] not in _OF_HTTP and one != _IS_TEXT]:
        found = shown(min(strange))
        findings.add(f"{where}.parameters", "none, because tensors travel in the message", found)


def _settings_of(
    parameters: Mapping[str, kserve.InferParameter], findings: Findings
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in sorted(parameters.keys() & _SETTINGS.keys()):
        choice = parameters[name].WhichOneof("parameter_choice")
        where = _parameter(name)
        if choice is None:
            findings.add(where, "a value", "none")
            continue
        value = getattr(parameters[name], choice)
        # KServe's own messages, unlike Triton's, have no fractions: one comes as text there.
        is_text = isinstance(value, str) and float in get_args(_SETTINGS[name])
        kind = float if is_text else _SETTINGS[name]  # "null" is no number
        try:
            settings[name] = msgspec.convert(value, kind, strict=not is_text)
        except msgspec.ValidationError:
            findings.misfit(where, _SETTINGS[name], value)
    unknown = parameters.keys() - _SETTINGS.keys() - {_ASKS_FOR_FINAL}
    findings.add_each(unknown, _parameter, f"one of {', '.join(_SETTINGS)}", "another name")
    return settings


def _unpack(raw: bytes) -> bytes | None:
    """The one element of a raw tensor of BYTES; None if there is not one."""
    if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
        return None
    return raw[4:]


class InferenceServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._seats = serving.router.seats
        self._catalogue = serving.router.seats.catalogue

    async def ServerLive(
        self, request: kserve.ServerLiveRequest, context: Context
    ) -> kserve.ServerLiveResponse:
        """A process that answers is live."""
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: kserve.ServerReadyRequest, context: Context
    ) -> kserve.ServerReadyResponse:
        """The same as gRPC's own health of this service."""
        return kserve.ServerReadyResponse(ready=self._seats.can_serve())

    async def ModelReady(
        self, request: kserve.ModelReadyRequest, context: Context
    ) -> kserve.ModelReadyResponse:
        """Whether a request for the model could be placed; an unknown model is not ready either."""
        _check_model(request.name, request.version)
        return kserve.ModelReadyResponse(ready=self._seats.can_serve(request.name))

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        return kserve.ServerMetadataResponse(name="effuse", version=version("effuse"))

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        """A model's tensors; raises `NotFound` and `Unavailable`."""
        _check_model(request.name, request.version)
        return describe_tensors(self._catalogue.find(request.name).name)

    async def ModelInfer(
        self, request: kserve.ModelInferRequest, context: Context
    ) -> kserve.ModelInferResponse:
        """The whole answer, or all answers, at the end."""
        with naming(_path_of):
            answer = await self._serving.answer(lambda: request_of(request), context)
        return answer_of(request, answer)

    async def ModelStreamInfer(  # type: ignore[override]  # the stub knows only generators
        self,
        request_iterator: AsyncIterator[kserve.ModelInferRequest],
        context: Context,
    ) -> None:
        """Answers one request after the other, until the client has no more. An error of a request
        goes into the stream, according to the protocol; a fault of ours ends the stream."""
        # Waits for requests without a deadline by intent: the client's own ends it.
        async for request in request_iterator:
            read, translator_of = partial(request_of, request), partial(pieces_of, request)
            try:
                with naming(_path_of):
                    await self._serving.stream(read, context, translator_of)
            except (Bug, Cancelled):
                raise
            except EffuseError as error:
                await _send_failure(context, request, error)


def _check_model(name: str, model_version: str) -> None:
    check_model_name(name, "name")
    check_version(model_version)


async def _send_failure(
    context: Context, request: kserve.ModelInferRequest, error: EffuseError
) -> None:
    response = kserve.ModelStreamInferResponse(
        error_message=f"{error.code.name}: {error.message}",
        infer_response=kserve.ModelInferResponse(id=request.id),
    )
    try:
        await AnswerStream(context).send(response)
    except ClientGone as gone:
        raise Cancelled("the client cancelled") from gone
