"""Mistakes of gateways and tensor clients: vLLM's engine protocol and KServe's."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from bad_input.case import NOT_FOUND, Case
from bad_input.clients import BAD_NAMES
from bad_input.requests import Facts
from google.protobuf.message import Message

from effuse.compat import kserve_pb2 as kserve
from effuse.compat import vllm_engine_pb2 as vllm

VLLM = "/vllm.grpc.engine.VllmEngine"
KSERVE = "/inference.GRPCInferenceService"


def gateway_cases(at: Facts) -> Iterator[tuple[str, Case]]:
    """All of them, by name."""
    for table in (_vllm, _vllm_sampling, _kserve):
        yield from table(at)


def _vllm(at: Facts) -> Iterator[tuple[str, Case]]:
    ids = vllm.TokenizedInput(input_ids=[5, 6, 7])
    wrong: dict[str, tuple[vllm.GenerateRequest, str]] = {
        "no input": (vllm.GenerateRequest(), "text"),
        "empty text": (vllm.GenerateRequest(text=""), "text"),
        "no ids": (
            vllm.GenerateRequest(tokenized=vllm.TokenizedInput(original_text="a")),
            "tokenized.input_ids",
        ),
        "mask id": (
            vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5, at.mask])),
            "tokenized.input_ids[1]",
        ),
        "beyond the vocabulary": (
            vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[at.vocab_size])),
            "tokenized.input_ids[0]",
        ),
        "too many ids": (
            vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5] * at.max_model_len)),
            "tokenized.input_ids",
        ),
        "request id": (vllm.GenerateRequest(request_id="a b", tokenized=ids), "request_id"),
        "another server's KV": (
            vllm.GenerateRequest(tokenized=ids, kv_transfer_params=vllm.KvTransferParams()),
            "kv_transfer_params",
        ),
        "another server's KV, JSON": (
            vllm.GenerateRequest(tokenized=ids, kv_transfer_params_json=""),
            "kv_transfer_params_json",
        ),
        "media": (vllm.GenerateRequest(tokenized=ids, mm_inputs=vllm.Media()), "mm_inputs"),
        "references": (vllm.GenerateRequest(tokenized=ids, media_refs=vllm.Media()), "media_refs"),
        "more media": (
            vllm.GenerateRequest(tokenized=ids, extra_mm_inputs=[vllm.Media()]), "extra_mm_inputs"
        ),
        "a rank": (vllm.GenerateRequest(tokenized=ids, data_parallel_rank=-1),
            "data_parallel_rank"),
    }  # fmt: skip
    for name, (sent, field) in wrong.items():
        yield f"vllm: {name}", Case(method=f"{VLLM}/Generate", sent=[sent], field=field)


def _vllm_sampling(at: Facts) -> Iterator[tuple[str, Case]]:
    own = "sampling_params."
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "n beyond the fleet's": ({"n": 9}, f"{own}n"), "n huge": ({"n": 2**32 - 1}, f"{own}n"),
        "logprobs negative": ({"logprobs": -1}, f"{own}logprobs"),
        "logprobs 21": ({"logprobs": 21}, f"{own}logprobs"),
        "bias of a negative id": ({"logit_bias": {-1: 1.0}}, f"{own}logit_bias"),
        "bias nan": ({"logit_bias": {5: math.nan}}, f"{own}logit_bias[5]"),
        "prompt_logprobs": ({"prompt_logprobs": 0}, f"{own}prompt_logprobs"),
        "truncate": ({"truncate_prompt_tokens": 5}, f"{own}truncate_prompt_tokens"),
        "stop string kept": (
            {"include_stop_str_in_output": True}, f"{own}include_stop_str_in_output"
        ),
        "json_object": ({"json_object": False}, f"{own}json_object"),
        "choice": ({"choice": vllm.ChoiceConstraint()}, f"{own}choice"),
        "temperature": ({"temperature": -1.0}, f"{own}temperature"),
        "top_p": ({"top_p": math.nan}, f"{own}top_p"),
        "top_k": ({"top_k": at.vocab_size + 1}, f"{own}top_k"),
        "min_p": ({"min_p": 1.5}, f"{own}min_p"),
        "frequency": ({"frequency_penalty": 3.0}, f"{own}frequency_penalty"),
        "presence": ({"presence_penalty": -3.0}, f"{own}presence_penalty"),
        "repetition": ({"repetition_penalty": -1.0}, f"{own}repetition_penalty"),
        "max_tokens 0": ({"max_tokens": 0}, f"{own}max_tokens"),
        "min above max": ({"max_tokens": 2, "min_tokens": 3}, f"{own}min_tokens"),
        "stops": ({"stop": [str(i) for i in range(17)]}, f"{own}stop"),
        "stop id": ({"stop_token_ids": [at.mask]}, f"{own}stop_token_ids[0]"),
    }  # fmt: skip
    for name in ("json_schema", "regex", "grammar", "structural_tag"):
        wrong[name] = ({name: ""}, f"{own}{name}")
    for name, (params, field) in wrong.items():
        request = vllm.GenerateRequest(
            tokenized=vllm.TokenizedInput(input_ids=[5, 6, 7]),
            sampling_params=vllm.SamplingParams(**params),
        )
        yield f"vllm: {name}", Case(method=f"{VLLM}/Generate", sent=[request], field=field)


def _tensor(**changes: Any) -> kserve.ModelInferRequest.InferInputTensor:
    contents = kserve.InferTensorContents(bytes_contents=[b"how many?"])
    fields: dict[str, Any] = {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": [1],
        "contents": contents,
    }
    return kserve.ModelInferRequest.InferInputTensor(**(fields | changes))


def _infer(*raw: bytes, **fields: Any) -> kserve.ModelInferRequest:
    return kserve.ModelInferRequest(**({"inputs": [_tensor()], "raw_input_contents": raw} | fields))


def _raw(*raw: bytes) -> kserve.ModelInferRequest:
    return _infer(*raw, inputs=[_tensor(contents=None)])


def _packed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _set_to(name: str, **choice: Any) -> kserve.ModelInferRequest:
    return _infer(parameters={name: kserve.InferParameter(**choice)})


def _kserve_requests(at: Facts) -> dict[str, tuple[kserve.ModelInferRequest, str]]:
    texts = kserve.InferTensorContents
    output = kserve.ModelInferRequest.InferRequestedOutputTensor
    shared = {"shared_memory_region": kserve.InferParameter(string_param="theirs")}
    elements = "inputs[0].contents.bytes_contents"
    return {
        "nothing": (kserve.ModelInferRequest(), "inputs"),
        "two inputs": (_infer(inputs=[_tensor(), _tensor()]), "inputs"),
        "another input": (_infer(inputs=[_tensor(name="IN")]), "inputs"),
        "numbers": (_infer(inputs=[_tensor(datatype="FP32")]), "inputs[0].datatype"),
        "shape of two": (_infer(inputs=[_tensor(shape=[2])]), "inputs[0].shape"),
        "no shape": (_infer(inputs=[_tensor(shape=[])]), "inputs[0].shape"),
        "negative shape": (_infer(inputs=[_tensor(shape=[-1])]), "inputs[0].shape"),
        "deep shape": (_infer(inputs=[_tensor(shape=[1, 1, 1])]), "inputs[0].shape"),
        "no element": (_infer(inputs=[_tensor(contents=None)]), elements),
        "two elements": (
            _infer(inputs=[_tensor(contents=texts(bytes_contents=[b"a", b"b"]))]), elements
        ),
        "other elements": (
            _infer(inputs=[_tensor(contents=texts(bool_contents=[True]))]), elements
        ),
        "not UTF-8": (
            _infer(inputs=[_tensor(contents=texts(bytes_contents=[b"\xc3\x28"]))]), "inputs[0]"
        ),
        "empty text": (_infer(inputs=[_tensor(contents=texts(bytes_contents=[b""]))]), "inputs[0]"),
        "shared memory": (_infer(inputs=[_tensor(parameters=shared)]), "inputs[0].parameters"),
        "raw without a length": (_raw(b"abc"), "raw_input_contents"),
        "raw of another length": (_raw(b"\xff\xff\xff\xffabc"), "raw_input_contents"),
        "raw twice": (_raw(_packed(b"a"), _packed(b"b")), "raw_input_contents"),
        "raw, not UTF-8": (_raw(_packed(b"\xff")), "inputs[0]"),
        "raw beside contents": (_infer(_packed(b"a")), "raw_input_contents"),
        "another output": (_infer(outputs=[output(name="OUT")]), "outputs[0].name"),
        "output to shared memory": (
            _infer(outputs=[output(name="text_output", parameters=shared)]),
            "outputs[0].parameters",
        ),
        "unknown parameter": (_set_to("beams", int64_param=2), "parameters['beams']"),
        "parameter without a value": (_set_to("seed"), "parameters['seed']"),
        "parameter of another type": (
            _set_to("max_tokens", string_param="8"), "parameters['max_tokens']"
        ),
        "max_tokens negative": (
            _set_to("max_tokens", int64_param=-1), "parameters['max_tokens']"
        ),
        "max_tokens of 40 bits": (
            _set_to("max_tokens", uint64_param=2**40), "parameters['max_tokens']"
        ),
        "algorithm of 12 kilobytes": (
            _set_to("algorithm", string_param="\N{PILE OF POO}" * 3000), "parameters['algorithm']"
        ),
        "max_tokens 0": (_set_to("max_tokens", int64_param=0), "parameters['max_tokens']"),
        "temperature nan": (
            _set_to("temperature", double_param=math.nan), "parameters['temperature']"
        ),
        "temperature of 64 bits": (
            _set_to("temperature", double_param=1e300), "parameters['temperature']"
        ),
        "unknown algorithm": (
            _set_to("algorithm", string_param="beam"), "parameters['algorithm']"
        ),
        "logprobs": (_set_to("logprobs", int64_param=2), "parameters['logprobs']"),
        "empty stop": (_set_to("stop", string_param=""), "parameters['stop']"),
        "window": (_set_to("window", int64_param=0), "parameters['window']"),
        "model": (_infer(model_name="../a"), "model_name"),
        "max_tokens beyond the context": (
            _set_to("max_tokens", int64_param=at.max_model_len), "parameters['max_tokens']"
        ),
        "top_k beyond the vocabulary": (
            _set_to("top_k", int64_param=at.vocab_size + 1), "parameters['top_k']"
        ),
        "n beyond the fleet's": (_set_to("n", int64_param=9), "parameters['n']"),
        "class": (_set_to("request_class", string_param="x"), "parameters['request_class']"),
        "setting of another algorithm": (
            _set_to("eps", double_param=0.5), "parameters['eps']"
        ),
        "null as text": (_set_to("temperature", string_param="null"), "parameters['temperature']"),
    }  # fmt: skip


def _kserve(at: Facts) -> Iterator[tuple[str, Case]]:
    requests = _kserve_requests(at)
    for name, (sent, field) in requests.items():
        yield f"kserve: {name}", Case(method=f"{KSERVE}/ModelInfer", sent=[sent], field=field)
    for name in ("nothing", "raw twice", "max_tokens 0", "unknown parameter"):
        sent, field = requests[name]
        method = f"{KSERVE}/ModelStreamInfer"
        yield f"kserve stream: {name}", Case(method=method, sent=[sent], field=field)
    lost: Sequence[tuple[str, Message]] = (
        ("ModelInfer", _infer(model_name="nowhere")),
        ("ModelInfer", _infer(model_version="2")),
        ("ModelStreamInfer", _infer(model_version="latest")),
        ("ModelReady", kserve.ModelReadyRequest(name="sdar", version="2")),
        ("ModelMetadata", kserve.ModelMetadataRequest(name="nowhere")),
        ("ModelMetadata", kserve.ModelMetadataRequest(name="sdar", version="0")),
    )
    for number, (method, message) in enumerate(lost):
        yield (
            f"kserve: not there {number}",
            Case(method=f"{KSERVE}/{method}", sent=[message], code=NOT_FOUND),
        )
    for name, bad in BAD_NAMES.items():
        for method, kind in (
            ("ModelReady", kserve.ModelReadyRequest), ("ModelMetadata", kserve.ModelMetadataRequest)
        ):  # fmt: skip
            path = f"{KSERVE}/{method}"
            yield f"{method}: {name}", Case(method=path, sent=[kind(name=bad)], field="name")
