"""The D2F authors' loop runs from a checkout of its layout, apart from all that effuse holds.

The checkout is a stand-in that the test writes: same files, class, arguments and results.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint

from effuse.cli.baseline import Rivals
from effuse.cli.baseline import check as check_rivals
from effuse.cli.d2f_repo import authors_loop, check, environment
from effuse.cli.figures import Run, ServiceGoals
from effuse.cli.load import Tally
from effuse.client.params import Params
from effuse.config.flags import CommandError

CHECKOUT = """
import json, os, sys, time
import torch
from model_cache.model import NAME

print("noise on standard output")


class Tokenizer:
    eos_token = "<eos>"

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(one)) for one in ids)


class Model(torch.nn.Module):
    def forward(self, ids):
        return ids + 1


class DreamLoRA:
    def __init__(self, pretrained, lora_path, batch_size=1, device="cuda", dtype="auto",
                 max_new_tokens=128, max_length=2048, temperature=0.2, block_size=4,
                 mask_token_id=0, block_add_threshold=0.5, decoded_token_threshold=0.9,
                 skip_threshold=1.0, **kwargs):
        seen = {key: value for key, value in locals().items()
                if isinstance(value, (str, int, float))}
        self.device, self.max_length = torch.device(device), max_length
        self.model, self.tokenizer, self.most = Model(), Tokenizer(), max_new_tokens
        descriptors = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{one}")]
        told = {"arguments": seen, "environment": dict(os.environ), "argv": sys.argv,
                "threads": torch.get_num_threads(), "descriptors": descriptors, "name": NAME}
        open(os.path.join(lora_path, "seen.json"), "w").write(json.dumps(told))

    def _generate_block_single(self, prompt):
        ids = self.model(self.model(prompt))[0].tolist()
        BEHAVIOUR
"""
RETURNS = {"llada": "return ids", "dream": "return self.tokenizer.decode(ids).split('x')[0]"}
SECRETS = {
    "EFFUSE_TOKEN": "a secret",
    "EFFUSE_FLEET_CERT": "/keys/fleet.pem",
    "HF_TOKEN": "another",
    "AWS_SECRET_ACCESS_KEY": "a third",
    "EFFUSE_TARGET": "10.0.0.1:50051",
}


def write_checkout(path: Path, architecture: str, behaviour: str | None = None) -> Path:
    folder = path / "D2F-eval"
    (folder / "model_cache").mkdir(parents=True)
    (folder / "model_cache" / "model.py").write_text("NAME = 'model'\n")
    source = CHECKOUT.replace("BEHAVIOUR", behaviour or RETURNS[architecture])
    (folder / f"eval_{architecture}.py").write_text(source)
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    return path


def rivals_of(tmp_path: Path, architecture: Architecture, adapter: Path | None) -> Rivals:
    """Only the stand-in uses the adapter, so it is not read here."""
    directory = write_tiny_checkpoint(tmp_path / "tiny", architecture, block_size=4)
    made = check_rivals(directory, None, ["abc", "de"], Params(max_tokens=6), 1)
    return Rivals(
        directory=directory, adapter=adapter, config=made.config, prompts=made.prompts,
        params=made.params, concurrency=1,
    )  # fmt: skip


def run(repo: Path, rivals: Rivals, timeout_s: float = 60.0) -> Run:
    check(repo, rivals)
    tally = Tally(lambda: None)
    authors_loop(repo, rivals, timeout_s, tally)
    return tally.run("D2F authors' loop", ServiceGoals())


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_a_row_of_the_authors_loop(
    architecture: Architecture, tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rivals = rivals_of(tmp_path, architecture, adapter)
        made = run(write_checkout(tmp_path / "repo", architecture), rivals)
    finally:
        torch.set_num_threads(before)
    ends = set(rivals.config.eos_token_ids)
    for one, prompt in zip(made.samples, rivals.prompts, strict=True):
        expected = [each + 2 for each in prompt][:6]
        cut = next((at for at, each in enumerate(expected) if each in ends), len(expected))
        assert one.text == " ".join(map(str, expected[:cut]))
        assert (one.tokens, one.forward_passes) == (cut, 2)
        assert 0 < one.total_s <= made.total_s
    _is_apart(json.loads((adapter / "seen.json").read_text()), rivals)


def _is_apart(seen: dict[str, Any], rivals: Rivals) -> None:
    """Its settings are those of the other rows; it knows nothing else."""
    everything = json.dumps(seen)
    assert not [value for value in SECRETS.values() if value in everything]
    assert not [name for name in seen["environment"] if name in SECRETS]
    assert seen["environment"]["HOME"] != os.environ.get("HOME")
    assert seen["threads"] == rivals.num_threads == 1
    assert seen["environment"]["OMP_NUM_THREADS"] == "1"
    assert not [one for one in seen["descriptors"] if one.startswith("socket:")]
    arguments = seen["arguments"]
    assert arguments["max_new_tokens"] == 8  # whole blocks
    assert (arguments["temperature"], arguments["block_size"]) == (0.0, 4)
    assert arguments["skip_threshold"] == pytest.approx(0.9)
    assert arguments["decoded_token_threshold"] == pytest.approx(0.95)
    assert arguments["mask_token_id"] == rivals.config.mask_token_id


def test_only_what_is_listed_reaches_the_child() -> None:
    given = {**SECRETS, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/root", "X": "y"}
    made = environment(given, "/empty", 3)
    assert {name for name in made if name in given} == {"PATH", "CUDA_VISIBLE_DEVICES", "HOME"}
    assert (made["HOME"], made["OMP_NUM_THREADS"]) == ("/empty", "3")


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("raise ValueError('no such thing')", "status 1: ValueError: no such thing"),
        ("os._exit(3)", "status 3: it printed nothing"),
        ("time.sleep(600)", "wrote nothing for 5 s"),
        ("import lm_eval_that_is_not_there", "No module named 'lm_eval_that_is_not_there'"),
    ],
)
def test_a_checkout_that_fails_is_one_line(
    behaviour: str, told: str, tmp_path: Path, adapter: Path
) -> None:
    repo = write_checkout(tmp_path / "repo", "llada", behaviour)
    rivals = rivals_of(tmp_path, "llada", adapter)
    with pytest.raises(CommandError, match=told):
        run(repo, rivals, timeout_s=5.0 if "sleep" in behaviour else 60.0)


def test_what_is_no_checkout_is_refused_before_anything_runs(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(CommandError, match=r"expected D2F-eval/eval_llada\.py in"):
        check(tmp_path, rivals_of(tmp_path / "a", "llada", adapter))
    repo = write_checkout(tmp_path / "repo", "llada")
    with pytest.raises(CommandError, match="expected --adapter"):
        check(repo, rivals_of(tmp_path / "b", "llada", None))
    with pytest.raises(CommandError, match="expected a model of dream or llada, got sdar"):
        check(repo, rivals_of(tmp_path / "c", "sdar", adapter))
