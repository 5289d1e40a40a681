"""Training the bundled model: batches, masks, the loop, resuming, its command line, its result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import effuse.models
from effuse.problems.problem import problem
from effuse.training import train
from effuse.training.data import NO_LABEL, BatchShape, Rows, Source, SourceOptions, batches
from effuse.training.denoiser import Denoiser, DenoiserConfig, Visibility
from effuse.training.evaluate import Setting, evaluate
from effuse.training.optimizer import orthogonalise
from effuse.training.release import adopt, read_release, write_release
from effuse.training.tokenizer import ANSWER_ID, EOS_ID, MASK_ID
from effuse.training.train import Plan, Trainer

BUNDLED = Path(effuse.models.__path__[0]) / "bundled"
TOKENIZER = BUNDLED / "tokenizer.json"
SHAPE = BatchShape(rows=2, length=1024)
OPTIONS = SourceOptions(TOKENIZER, 0, SHAPE)
TINY = DenoiserConfig(
    vocab_size=1216,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Source(OPTIONS).batch(0)


def _visible(rows: Rows) -> Visibility:
    return Visibility(*(torch.from_numpy(field).int() for field in rows[3:]))


def test_batches_are_a_function_of_seed_and_step(rows: Rows) -> None:
    again = Source(OPTIONS).batch(0)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    other = Source(OPTIONS).batch(1)
    assert not np.array_equal(rows.ids, other.ids)


def test_worker_processes_give_the_same_batches_in_order() -> None:
    source = Source(OPTIONS)
    made = list(batches(OPTIONS, 3, 8, workers=2))
    assert len(made) == 5
    for step, batch in zip(range(3, 8), made, strict=True):
        assert np.array_equal(batch.ids, source.batch(step).ids)


def test_only_masked_answer_positions_are_learnt(rows: Rows) -> None:
    learnt = rows.labels != NO_LABEL
    assert learnt.any()
    assert np.array_equal(learnt, rows.ids == MASK_ID)
    assert not learnt[rows.copy == 0].any()
    assert (rows.labels[learnt] == EOS_ID).any()


def test_noise_rises_within_a_group(rows: Rows) -> None:
    masked = rows.ids == MASK_ID
    group = (rows.copy == 2) & (rows.block > rows.start)
    first = (rows.copy == 2) & (rows.block == rows.start)
    assert masked[group].mean() > masked[first].mean() + 0.1


def test_a_clean_token_sees_its_own_and_earlier_clean_blocks_only(rows: Rows) -> None:
    visibility = _visible(rows)
    sees = visibility.dense()[0]
    copy, block, document = rows.copy[0], rows.block[0], rows.document[0]
    for token in np.flatnonzero((copy == 0) & (document == 1))[::7]:
        expected = (document == 1) & (copy == 0) & (block <= block[token])
        assert np.array_equal(sees[token].numpy(), expected)


def test_a_noisy_token_sees_clean_blocks_before_its_group_and_its_group(rows: Rows) -> None:
    sees = _visible(rows).dense()[0]
    copy, block, start, document = (
        field[0] for field in (rows.copy, rows.block, rows.start, rows.document)
    )
    for token in np.flatnonzero((copy == 2) & (document == 0))[::5]:
        clean = (copy == 0) & (block < start[token])
        group = (copy == 2) & (start == start[token]) & (block <= block[token])
        assert np.array_equal(sees[token].numpy(), (document == 0) & (clean | group))


def test_tiles_leave_nothing_visible_out(rows: Rows) -> None:
    visibility = _visible(rows)
    dense = visibility.dense()
    tiles = dense.shape[1] // 128
    needed = dense.reshape(-1, tiles, 128, tiles, 128).any(2).any(-1)
    kept = visibility.tiles().to_dense()[:, 0].bool()
    assert not (needed & ~kept).any()
    assert not kept.all()


def test_orthogonalise_brings_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 12, 40, generator=generator)
    for moved in (orthogonalise(stack), orthogonalise(stack.transpose(1, 2))):
        values = torch.linalg.svdvals(moved)
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_loss_falls(rows: Rows) -> None:
    trainer = Trainer(TINY, Plan(steps=16, warmup=2, shape=SHAPE), CPU)
    losses = [trainer.learn(rows).item() for _ in range(16)]
    assert losses[0] > 6.5
    assert losses[-1] < losses[0] - 2


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    plan = Plan(steps=6, warmup=2, shape=SHAPE)
    source = Source(OPTIONS)
    whole, first, second = (Trainer(TINY, plan, CPU) for _ in range(3))
    for step in range(6):
        whole.learn(source.batch(step))
    for step in range(3):
        first.learn(source.batch(step))
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for step in range(3, 6):
        second.learn(source.batch(step))
    assert second.step == 6
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    for name, value in whole.average.items():
        assert torch.equal(value, second.average[name]), name


def test_resuming_under_another_plan_is_refused(tmp_path: Path) -> None:
    Trainer(TINY, Plan(steps=6), CPU).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="made with steps 6, not 7"):
        Trainer(TINY, Plan(steps=7), CPU).load(tmp_path / "checkpoint")


def test_release_reads_back_and_can_be_started_from(tmp_path: Path) -> None:
    trainer = Trainer(TINY, Plan(), CPU)
    write_release(tmp_path, trainer.average, TINY, TOKENIZER)
    model, tokenizer = read_release(tmp_path, CPU)
    assert tokenizer.get_vocab_size() <= TINY.vocab_size
    fresh = Denoiser(TINY)
    adopt(tmp_path, fresh, TOKENIZER)
    known = tokenizer.get_vocab_size()
    for name, value in model.state_dict().items():
        rows = slice(None, known if "embed" in name else None)
        assert torch.equal(fresh.state_dict()[name][rows], value[rows]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out"),
        (["--seed", "-1"], "whole number of at least 0"),
        (["--steps", "0"], "whole number of at least 1"),
        (["--rows", "1.5"], "whole number of at least 1"),
        (["--minutes", "nan"], "minutes of at least 0.1"),
        (["--minutes", "soon"], "minutes of at least 0.1"),
        (["--length", "1000"], "multiple of 128"),
        (["--resume"], "does not exist"),
        (["--start", "nowhere"], "does not exist"),
        (["--speed", "9"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--out", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit) as stopped:
        train.main([*out, *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_existing_checkpoint_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(TINY, Plan(), CPU).save(tmp_path / "checkpoint")
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path), "--device", "cpu"])
    assert "add --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting", [Setting("block diffusion", 1, 0.9), Setting("D2F", 4, 0.9)], ids=lambda s: s.name
)
def test_bundled_weights_solve_held_out_problems(setting: Setting) -> None:
    model, tokenizer = read_release(BUNDLED, CPU)
    problems = [problem(99, index, "held_out") for index in range(8)]
    outcomes = evaluate(model, tokenizer, problems, setting, CPU)
    assert sum(outcome.exact for outcome in outcomes) >= 7
    tokens = sum(outcome.tokens for outcome in outcomes)
    assert tokens / sum(outcome.forwards for outcome in outcomes) > 5
    assert tokenizer.encode(problems[0].prompt).ids[-1] == ANSWER_ID
