"""Answers a batch in this process, without a fleet."""

import effuse

with effuse.LLM() as llm:  # the bundled model; LLM("a/checkpoint") takes another one
    prompts = [f"Find the value of {number} + 561 + 58." for number in (2, 30, 400)]
    for answer in llm.generate(prompts, effuse.Params(max_tokens=64)):
        print(answer.text.splitlines()[-1])
