"""Asks a fleet that `effuse up` runs in another terminal."""

import effuse

question = "Tom has 3 boxes with 12 pens in each. He gives 7 pens away. How many pens are left?"
with effuse.Client("127.0.0.1:50051") as client:
    answer = client.generate(question, effuse.Params(max_tokens=64))
    print(answer.text, f"({answer.stats.tokens_per_forward:.1f} tokens a forward)")
    for piece in client.stream(question):
        print(piece, end="", flush=True)
    print()
