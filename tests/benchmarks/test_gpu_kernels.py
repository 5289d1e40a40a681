"""The aims of sampling compare like with like."""

from __future__ import annotations

import torch

from effuse.benchmarks.gpu_kernels import sampling_aims
from effuse.benchmarks.gpu_rows import BESIDE_CHAIN, MODES, Pair, Sampled, torch_chain
from effuse.benchmarks.report import Report
from effuse.kernels.values import ScoreCode


def test_the_chain_takes_the_entropy_where_ours_does() -> None:
    for name, with_entropy in BESIDE_CHAIN.items():
        assert (MODES[name].score is ScoreCode.NEG_ENTROPY) == with_entropy
        assert MODES[name].temperature == 0
    assert set(BESIDE_CHAIN.values()) == {False, True}


def test_the_chain_gives_the_entropy_only_if_asked() -> None:
    logits = torch.randn(4, 50, dtype=torch.bfloat16)
    token, confidence, score = torch_chain(logits, with_entropy=True)
    probability = logits.float().softmax(-1)
    torch.testing.assert_close(score, -torch.special.entr(probability).sum(-1))
    assert torch.equal(token, logits.argmax(-1))
    same = torch_chain(logits, with_entropy=False)
    assert len(same) == 2
    assert torch.equal(same[0], token) and torch.equal(same[1], confidence)


def test_aims_are_held_against_what_took_turns_with_ours() -> None:
    found = Sampled(
        rows=2048,
        read=100.0,
        modes={"greedy": 120.0, "entropy": 250.0},
        chains={"greedy": Pair(150.0, 1500.0), "entropy": Pair(300.0, 1200.0)},
    )
    report = Report("")
    sampling_aims(report, found)
    assert [(figure.value, figure.holds) for figure in report.figures] == [
        (1.2, True),
        (10.0, True),
        (4.0, False),
    ]
    names = [figure.name for figure in report.figures]
    assert names[1].endswith("without entropy") and names[2].endswith("with entropy")
