"""Calls a gateway with the openai package and prints the results; for a Python that has it."""

import json
import sys

import openai

url, question = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
messages = [{"role": "user", "content": question}]


def chat(asked: openai.OpenAI = client, **settings: object) -> openai.types.chat.ChatCompletion:
    return asked.chat.completions.create(model="bundled", messages=messages, **settings)


def failure(**settings: object) -> str:
    try:
        chat(**settings)
    except openai.APIStatusError as error:
        return f"{error.status_code}: {error.message}"
    return ""


def streamed() -> dict[str, object]:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, temperature=0))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "texts": [choice.delta.content for choice in choices if choice.delta.content],
        "reason": choices[-1].finish_reason,
        "completion_tokens": chunks[-1].usage.completion_tokens,
    }


def hang_up() -> bool:
    """Leaves an answer that would go on for long."""
    stream = chat(stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    return True


# A gateway may know a model before its tokenizer, and answers 503 until then.
whole = chat(client.with_options(max_retries=8), temperature=0)
stopped = chat(temperature=0, stop=["\n"])
likely = chat(temperature=0, logprobs=True, top_logprobs=2, presence_penalty=0.1)
completed = client.completions.create(model="bundled", prompt=question, max_tokens=8)
print(
    json.dumps(
        {
            "models": [one.id for one in client.models.list()],
            "text": whole.choices[0].message.content,
            "reason": whole.choices[0].finish_reason,
            "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
            "stopped": stopped.choices[0].message.content,
            "streamed": streamed(),
            "completion_tokens": completed.usage.completion_tokens,
            "too_long": failure(max_tokens=100_000),
            "schema": failure(response_format={"type": "json_object"}),
            "logprobs": [
                [one.token, one.logprob, len(one.top_logprobs)]
                for one in likely.choices[0].logprobs.content
            ],
            "hung_up": hang_up(),
        }
    )
)
