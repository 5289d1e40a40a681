"""The D2F authors' loop from a checkout of their repository: a row of `effuse bench --baseline`.

The checkout is foreign code, so it runs in a separate process. Its environment has no tokens, keys
or addresses, and it gets no descriptor of this process. It answers one prompt at a time. The only
facts about the checkout: `D2F-eval/eval_dream.py` and `eval_llada.py` each have a class `DreamLoRA`
with a method `_generate_block_single` of ids [1, P].
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

from effuse.cli.baseline import Rivals
from effuse.cli.figures import Sample
from effuse.cli.load import Tally
from effuse.cli.process import KILLED_S, kill_group, last_lines
from effuse.cli.sandbox import hidden_environment
from effuse.config.flags import BadInput, CommandError

_CHILD: Final = Path(__file__).with_name("d2f_child.py")
_MODULES: Final = {"dream": "eval_dream", "llada": "eval_llada"}  # by the family's architecture
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")
_PIECE = 1 << 16


def check(repo: Path, rivals: Rivals) -> None:
    """Raises BadInput if the checkout has no loop for this checkpoint."""
    module = _MODULES.get(rivals.config.architecture)
    if module is None:
        known = " or ".join(_MODULES)
        raise BadInput(f"--d2f-repo: expected a model of {known}, got {rivals.config.architecture}")
    if rivals.adapter is None:
        raise BadInput("--d2f-repo: expected --adapter, which the authors' loop loads")
    if not (repo / "D2F-eval" / f"{module}.py").is_file():
        raise BadInput(f"--d2f-repo: expected D2F-eval/{module}.py in {repo}")


def authors_loop(repo: Path, rivals: Rivals, timeout_s: float, tally: Tally) -> None:
    """Answers all prompts with the checkout's loop. `timeout_s` is for loading and for each answer.
    Raises CommandError; complete answers are in the tally."""
    with _child(repo, rivals, timeout_s) as lines:
        next(lines)  # the model is loaded
        for _ in rivals.begin(tally):
            answer = next(lines)
            counts, took = (answer["tokens"], answer["forwards"]), answer["total_s"]
            tally.add(Sample(*counts, took, took, prompt=answer["prompt"], text=answer["text"]))


def job_of(repo: Path, rivals: Rivals) -> dict[str, Any]:
    """The child's complete input: the model, the prompts and the settings."""
    settings, block = rivals.settings, rivals.config.block_size
    # the loop writes whole blocks; the rest is cut off
    most = -(-rivals.max_tokens // block) * block
    taken = [(at, rivals.prompts[at]) for at in rivals.taken()]
    return {
        "repo": str(repo.resolve()),
        "module": _MODULES[rivals.config.architecture],
        "threads": rivals.num_threads,
        "prompts": taken,
        "ends": list(rivals.config.eos_token_ids),
        "max_tokens": rivals.max_tokens,
        "max_length": max((len(ids) for _, ids in taken), default=0) + most,
        "arguments": {
            "pretrained": str(rivals.directory.resolve()),
            "lora_path": str(rivals.adapter and rivals.adapter.resolve()),
            "device": rivals.device,
            "dtype": rivals.dtype,
            "max_new_tokens": most,
            "temperature": 0.0,
            "block_size": block,
            "mask_token_id": rivals.config.mask_token_id,
            "block_add_threshold": settings.block_add_threshold,
            "decoded_token_threshold": settings.full_activation_threshold,
            "skip_threshold": settings.confidence_threshold,
        },
    }


def environment(given: Mapping[str, str], home: str, num_threads: int) -> dict[str, str]:
    """The only parts of this process's environment for the child, and an empty home."""
    kept = {name: given[name] for name in _KEPT if name in given}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **offline, **threads, "HOME": home, "TMPDIR": home}


@contextmanager
def _child(repo: Path, rivals: Rivals, timeout_s: float) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of the child, which is killed at the end together with its own children."""
    with tempfile.TemporaryDirectory(prefix="effuse-d2f-") as home, ExitStack() as opened:
        job, log = Path(home, "job.json"), Path(home, "log")
        own = repo.resolve() / ".venv" / "bin" / "python"  # if `uv sync` made one
        job.write_text(json.dumps(job_of(repo, rivals)))
        number, writer = os.pipe()
        reader = opened.enter_context(os.fdopen(number, "rb", buffering=0))
        with job.open("rb") as source, log.open("wb") as output, os.fdopen(writer, "wb"):
            child = subprocess.Popen(
                [str(own) if own.exists() else sys.executable, "-I", str(_CHILD), str(writer)],
                stdin=source,
                stdout=output,
                stderr=output,
                cwd=home,
                env=environment(os.environ, home, rivals.num_threads),
                pass_fds=(writer,),
                start_new_session=True,
            )
        opened.callback(kill_group, child)
        with hidden_environment():
            yield _lines(reader, child, log, timeout_s)


def _lines(
    reader: FileIO, child: "subprocess.Popen[bytes]", log: Path, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Each line of the child, with this time limit. Raises CommandError if none arrives."""
    buffer = b""
    while True:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                raise CommandError(f"the D2F checkout wrote nothing for {timeout_s:g} s")
            piece = reader.read(_PIECE)
            if not piece:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(KILLED_S)
                last = (last_lines(log, 1) or ["it printed nothing"])[0]
                raise CommandError(f"the D2F checkout ended with status {child.returncode}: {last}")
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        yield json.loads(line)
