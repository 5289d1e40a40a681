"""The program that `d2f_repo.py` starts: the D2F authors' own loop, from their checkout.

It runs by its path, in the checkout's environment if there is one, so it imports nothing of effuse.
It reads a job as JSON from standard input. It writes JSON lines to the descriptor in its argument:
one once the model is loaded, then one for each answer. The checkout's output goes to the log.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class _Listener:
    """A tokenizer that remembers the last ids that it decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.last: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Any, *args: Any, **options: Any) -> Any:
        self.last = [int(one) for one in ids]
        return self._tokenizer.decode(ids, *args, **options)


def main() -> None:
    """Answers every prompt of the job, one at a time like the loop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    job = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as out:
        folder = Path(job["repo"], "D2F-eval")
        sys.path.insert(0, str(folder))
        import torch

        torch.set_num_threads(job["threads"])
        loop = _load(job)
        forwards = [0]
        loop.model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
        listener = loop.tokenizer = _Listener(loop.tokenizer)
        print(json.dumps({"threads": torch.get_num_threads()}), file=out)
        for place, ids in job["prompts"]:
            forwards[0], began = 0, time.monotonic()
            made = loop._generate_block_single(torch.tensor([ids], device=loop.device))
            # LLaDA's file returns ids, but Dream's returns decoded text.
            answer = listener.last if isinstance(made, str) else [int(one) for one in made]
            total_s = time.monotonic() - began
            ends = set(job["ends"])
            cut = next((at for at, one in enumerate(answer) if one in ends), len(answer))
            written = answer[: min(cut, job["max_tokens"])]
            text = listener.decode(written, skip_special_tokens=True)
            fields = {"prompt": place, "tokens": len(written), "forwards": forwards[0]}
            print(json.dumps({**fields, "text": text, "total_s": total_s}), file=out)


def _load(job: dict[str, Any]) -> Any:
    """The authors' model with their adapter and their loop."""
    loop = importlib.import_module(job["module"]).DreamLoRA(**job["arguments"])
    loop.max_length = max(loop.max_length, job["max_length"])
    return loop


if __name__ == "__main__":
    main()
