"""Chats with a fleet that `effuse up` runs in another terminal."""

import effuse

question = "Tom has 3 boxes with 12 pens in each. He gives 7 pens away. How many pens are left?"
chat = effuse.Chat().user(question)
with effuse.Client("127.0.0.1:50051") as client:
    answer = client.generate(chat, effuse.Params(max_tokens=64))
    print(answer.text, f"({answer.stats.tokens_per_forward:.1f} tokens a forward)")
    chat = chat.assistant(answer.text).user("Find the value of 30 + 561 + 58.")
    for piece in client.stream(chat):
        print(piece, end="", flush=True)
    print()
