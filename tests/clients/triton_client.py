"""Calls a router with tritonclient and prints the results; for a Python that has it."""

import json
import queue
import sys

import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

address, question = sys.argv[1:]
client = triton.InferenceServerClient(address)
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(numpy.array([question.encode()], dtype=object))


def failure(model: str, **parameters: object) -> str:
    try:
        client.infer(model, [prompt], parameters=parameters, client_timeout=60)
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return ""


def text_of(result: triton.InferResult, name: str = "text_output") -> str:
    found = result.as_numpy(name)
    return "" if found is None else str(found[0].decode())


def stream(model: str, request_id: str) -> dict[str, object]:
    pieces: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: pieces.put((result, error)))
    texts, reason, is_final = [], "", False
    client.async_stream_infer(model, [prompt], request_id=request_id)
    while not is_final:
        result, error = pieces.get(timeout=60)
        if result is None:
            client.stop_stream()
            return {"error": str(error)}
        response = result.get_response()
        is_final = response.parameters["triton_final_response"].bool_param
        texts.append(text_of(result))
        reason = text_of(result, "finish_reason")
    client.stop_stream()
    return {"texts": texts, "reason": reason, "id": response.id}


whole = client.infer("bundled", [prompt], request_id="7", parameters={"max_tokens": 64})
short = client.infer("bundled", [prompt], parameters={"max_tokens": 3})
print(
    json.dumps(
        {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready("bundled"),
            "inputs": [one.name for one in client.get_model_metadata("bundled").inputs],
            "text": text_of(whole),
            "reason": text_of(whole, "finish_reason"),
            "id": whole.get_response().id,
            "short": text_of(short, "finish_reason"),
            "tokens": short.get_response().parameters["completion_tokens"].int64_param,
            "stream": stream("bundled", "8"),
            "stream_error": stream("nowhere", "9"),
            "unknown_model": failure("nowhere"),
            "bad_setting": failure("bundled", temperature=-1.0),
        }
    )
)
