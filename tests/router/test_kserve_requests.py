"""A client's request in tensors, and effuse's version of it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from effuse.client.params import Params, make_request
from effuse.compat import kserve_pb2 as kserve
from effuse.protos.errors import InvalidRequest, NotFound, to_status
from effuse.router.kserve import answer_of, piece_of, request_of
from effuse.v1 import generation_pb2 as pb

TEXT = b"how many?"
FINISHED = pb.Finished(
    finish_reason=pb.FINISH_REASON_STOP,
    usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
    model="fake",
)
ANSWER = pb.GenerateResponse(
    text="three", finish_reason=FINISHED.finish_reason, usage=FINISHED.usage, model="fake"
)
PIECE = pb.GenerateStreamResponse(commit=pb.BlockCommit(text="three"))


def text_input(*texts: bytes, **fields: Any) -> kserve.ModelInferRequest.InferInputTensor:
    told = {"name": "text_input", "datatype": "BYTES", "shape": [1]} | fields
    contents = kserve.InferTensorContents(bytes_contents=texts)
    return kserve.ModelInferRequest.InferInputTensor(contents=contents, **told)


def asked(*, raw: bytes | None = None, **fields: Any) -> kserve.ModelInferRequest:
    if raw is not None:
        fields["raw_input_contents"] = [raw]
        fields["inputs"] = [text_input()]
    return kserve.ModelInferRequest(**{"id": "1", "inputs": [text_input(TEXT)], **fields})


def param(**value: Any) -> kserve.InferParameter:
    return kserve.InferParameter(**value)


@pytest.mark.parametrize("raw", [None, struct.pack("<I", 9) + b"how many?"])
def test_the_prompt_is_the_one_element_raw_or_not(raw: bytes | None) -> None:
    request = request_of(asked(raw=raw, model_name="m"))
    assert request == make_request("how many?", Params(model="m"))
    assert not request.HasField("request_id")  # 1 is shared by all


def test_what_kserves_own_client_says_of_its_bytes_over_http_means_nothing_here() -> None:
    """`InferInput.set_data_from_numpy` notes their number, over gRPC too."""
    prompt = text_input(parameters={"binary_data_size": param(int64_param=13)})
    wanted = kserve.ModelInferRequest.InferRequestedOutputTensor(
        name="text_output", parameters={"binary_data": param(bool_param=True)}
    )
    raw = [struct.pack("<I", 9) + TEXT]
    request = request_of(asked(inputs=[prompt], outputs=[wanted], raw_input_contents=raw))
    assert request == make_request("how many?", Params())


def test_what_mlservers_codec_says_of_text_is_taken_and_of_anything_else_refused() -> None:
    text = text_input(TEXT, parameters={"content_type": param(string_param="str")})
    assert request_of(asked(inputs=[text])) == make_request("how many?", Params())
    coded = text_input(b"aG93", parameters={"content_type": param(string_param="base64")})
    with pytest.raises(InvalidRequest, match="got 'content_type'"):
        request_of(asked(inputs=[coded]))


def test_parameters_are_those_of_the_python_client() -> None:
    parameters = {
        "max_tokens": param(int64_param=9),
        "temperature": param(double_param=0.5),
        "top_p": param(int64_param=1),
        "ignore_eos": param(bool_param=True),
        "stop": param(string_param="="),
        "algorithm": param(string_param="block_diffusion"),
        "triton_enable_empty_final_response": param(bool_param=True),
    }
    wanted = Params(
        max_tokens=9, temperature=0.5, top_p=1.0, ignore_eos=True, stop=("=",),
        algorithm="block_diffusion",
    )  # fmt: skip
    assert request_of(asked(parameters=parameters)) == make_request("how many?", wanted)


def test_a_fraction_may_be_text_as_kserves_own_messages_have_no_other_way_for_it() -> None:
    parameters = {"temperature": param(string_param="0.7"), "top_p": param(string_param="1")}
    wanted = Params(temperature=0.7, top_p=1.0)
    assert request_of(asked(parameters=parameters)) == make_request("how many?", wanted)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"inputs": []}, "inputs"),
    "another input": ({"inputs": [text_input(TEXT, name="x")]}, "inputs"),
    "two inputs": ({"inputs": [text_input(TEXT), text_input(TEXT)]}, "inputs"),
    "type": ({"inputs": [text_input(TEXT, datatype="INT64")]}, "inputs[0].datatype"),
    "shape": ({"inputs": [text_input(TEXT, shape=[2])]}, "inputs[0].shape"),
    "no shape": ({"inputs": [text_input(TEXT, shape=[])]}, "inputs[0].shape"),
    "no element": (
        {"inputs": [text_input()]}, "inputs[0].contents.bytes_contents",
    ),
    "utf-8": ({"inputs": [text_input(b"\xff")]}, "inputs[0]"),
    "raw that is short": ({"raw": b"\x09\x00"}, "raw_input_contents"),
    "raw that lies": ({"raw": struct.pack("<I", 1 << 31) + b"how"}, "raw_input_contents"),
    "two raw": ({"raw_input_contents": [b"", b""]}, "raw_input_contents"),
    "output": (
        {"outputs": [kserve.ModelInferRequest.InferRequestedOutputTensor(name="logits")]},
        "outputs[0].name",
    ),
    "name": ({"parameters": {"heat": param(double_param=1.0)}}, "parameters['heat']"),
    "what no tensor tells": (
        {"parameters": {"logprobs": param(int64_param=1)}}, "parameters['logprobs']",
    ),
    "kind": ({"parameters": {"top_k": param(string_param="7")}}, "parameters['top_k']"),
    "no number": ({"parameters": {"top_p": param(string_param="half")}}, "parameters['top_p']"),
    "choice": ({"parameters": {"score": param(string_param="x")}}, "parameters['score']"),
    "range": ({"parameters": {"max_tokens": param(int64_param=-1)}}, "parameters['max_tokens']"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "path"), BAD.values(), ids=BAD.keys())
def test_bad_form_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(asked(**fields))
    assert [one.field for one in caught.value.violations] == [path]


def test_every_violation_is_named_at_once() -> None:
    parameters = {"heat": param(double_param=1.0), "top_k": param(bool_param=True)}
    with pytest.raises(InvalidRequest) as caught:
        request_of(
            asked(inputs=[text_input(TEXT, datatype="FP32", shape=[3])], parameters=parameters)
        )
    assert len(caught.value.violations) == 4
    parameters = {"min_tokens": param(int64_param=3), "max_tokens": param(int64_param=2)}
    with pytest.raises(InvalidRequest, match=r"^parameters\['min_tokens'\]: expected at most"):
        request_of(asked(parameters=parameters))
    parameters = {"window": param(int64_param=-3), "seed": param(int64_param=-1)}
    with pytest.raises(InvalidRequest) as caught:
        request_of(asked(parameters=parameters))
    named = {one.field for one in caught.value.violations}
    assert named == {"parameters['window']", "parameters['seed']"}


def test_a_message_full_of_faults_gets_a_short_refusal() -> None:
    """Texts for each of them would fill the memory, and keep the event loop from other calls."""
    tensor = kserve.ModelInferRequest.InferRequestedOutputTensor
    number = 100_000
    unknown = {f"{at:x}": param(bool_param=True) for at in range(number)}
    wrong = {"top_k": param(bool_param=True)}
    for fields in ({"parameters": unknown | wrong}, {"outputs": [tensor(name="x")] * number}):
        with pytest.raises(InvalidRequest) as caught:
            request_of(asked(**fields))
        error = caught.value
        assert len(error.violations) <= 33 and len(error.message) < 64_000
        num_told = len(error.violations) - ("parameters" in fields)
        assert error.message.endswith(f"; and {number - num_told} more")
        assert to_status(error).message


def test_there_is_one_version() -> None:
    assert request_of(asked(model_version="1"))
    with pytest.raises(NotFound, match="version of a model is 1"):
        request_of(asked(model_version="2"))


def test_an_answer_is_raw_where_the_request_is() -> None:
    told = answer_of(asked(), ANSWER)
    assert [(one.name, list(one.contents.bytes_contents)) for one in told.outputs] == [
        ("text_output", [b"three"]),
        ("finish_reason", [b"stop"]),
    ]
    assert (told.id, told.model_name, told.parameters["completion_tokens"].int64_param) == (
        "1", "fake", 2,
    )  # fmt: skip
    raw = answer_of(asked(raw=b"\0\0\0\0"), ANSWER)
    assert list(raw.raw_output_contents) == [b"\x05\0\0\0three", b"\x04\0\0\0stop"]
    assert not any(one.HasField("contents") for one in raw.outputs)


def test_only_what_is_asked_for_is_told() -> None:
    wanted = kserve.ModelInferRequest.InferRequestedOutputTensor(name="finish_reason")
    told = answer_of(asked(outputs=[wanted]), ANSWER)
    assert [one.name for one in told.outputs] == ["finish_reason"]


def test_the_last_piece_of_a_stream_says_so() -> None:
    text, end = PIECE, pb.GenerateStreamResponse(finished=FINISHED)
    pieces = [piece_of(asked(), text, "m"), piece_of(asked(), end, "m", is_last=True)]
    flags = [one.infer_response.parameters["triton_final_response"].bool_param for one in pieces]
    assert flags == [False, True]
    assert [one.name for one in pieces[0].infer_response.outputs] == ["text_output"]


def test_several_answers_are_elements_of_the_same_tensors() -> None:
    both = pb.GenerateResponse(
        others=[pb.GenerateResponse(text="four", finish_reason=pb.FINISH_REASON_LENGTH)]
    )
    both.MergeFrom(ANSWER)
    both.others[0].usage.completion_tokens = 4
    told = answer_of(asked(parameters={"n": param(int64_param=2)}), both)
    assert [(list(one.shape), list(one.contents.bytes_contents)) for one in told.outputs] == [
        ([2], [b"three", b"four"]),
        ([2], [b"stop", b"length"]),
    ]
    assert told.parameters["prompt_tokens"].int64_param == 3
    assert told.parameters["completion_tokens"].int64_param == 6
    raw = answer_of(asked(raw=b"\0\0\0\0"), both).raw_output_contents
    assert raw[0] == b"\x05\0\0\0three\x04\0\0\0four"


def test_pieces_of_several_answers_say_whose_they_are() -> None:
    second = pb.GenerateStreamResponse(answer_index=1, finished=FINISHED)
    several = asked(parameters={"n": param(int64_param=2)})
    told = [piece_of(several, PIECE, "m"), piece_of(several, second, "m")]
    assert [one.infer_response.parameters["answer_index"].int64_param for one in told] == [0, 1]
    assert "answer_index" not in piece_of(asked(), PIECE, "m").infer_response.parameters
    assert request_of(several).n == 2
