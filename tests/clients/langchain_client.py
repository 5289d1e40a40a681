"""Calls a fleet with LangChain and prints the results; for a Python that has it."""

import json
import sys

from langchain_openai import ChatOpenAI

url, question = sys.argv[1:]
model = ChatOpenAI(model="bundled", base_url=f"{url}/v1", api_key="none", temperature=0)
answer = model.invoke(question)
pieces = [piece.content for piece in model.stream(question)]
batch = model.batch([question, question])
print(
    json.dumps(
        {
            "text": answer.content,
            "tokens": answer.usage_metadata["output_tokens"],
            "streamed": "".join(pieces),
            "batch": [one.content for one in batch],
        }
    )
)
