"""Why a split of workers was chosen, in sentences for operators."""

import math

from effuse.config.words import counted, plain, split_of
from effuse.router.planner import Objectives, Planner, Split


def reasons(planner: Planner, chosen: Split) -> list[str]:
    """Why a split was chosen, as lines for an operator."""
    kept = planner.within_reach(chosen.workers)
    workload, objectives = planner.workload, planner.objectives
    lines = [
        f"load: {plain(workload.rate)} requests a second with prompts of {workload.prompt:,.0f} "
        f"tokens and answers of {workload.answer:,.0f}"
    ]
    if kept.objectives != objectives:
        lost = _lost(objectives, kept.objectives)
        lines.append(f"left out, because {named(chosen)} cannot meet it: {lost}")
    pace = next((one for one in kept.fitting if one.batch == chosen.batch), None)
    each_s = planner.prompt_s
    speed = f"{plain(1e3 * each_s)} ms: {plain(1 / each_s)} a second"
    lines.append(f"a worker computes a prompt in {speed}")
    if pace is not None:
        limit_s = kept.gap_limit_s
        bound = "" if math.isinf(limit_s) else f", within {plain(1e3 * limit_s)} ms"
        lines.append(
            f"a decode worker answers {plain(pace.tokens_per_second / workload.answer)} requests a "
            f"second in batches of {plain(pace.batch)}, with gaps of {plain(1e3 * pace.gap_s)} ms"
            f"{bound}"
        )
    if chosen.prefill and kept.handoff_s > each_s:
        lines.append(f"links are slower: its pages take {plain(1e3 * kept.handoff_s)} ms to move")
    return [
        *lines,
        _help(kept, chosen),
        sustaining(chosen),
    ]


def named(chosen: Split) -> str:
    """The workers of a split, in words."""
    if not chosen.prefill:
        verb = "does" if chosen.decode == 1 else "do"
        return f"{counted(chosen.decode, 'worker')} that {verb} both"
    return split_of(chosen.prefill, chosen.decode)


def needed(chosen: Split) -> str:
    """The workers that a load needs."""
    return f"the load needs {sustaining(chosen, ', which')}"


def sustaining(chosen: Split, link: str = "") -> str:
    """The workers of a split, and what they sustain. `link` joins both."""
    verb = "sustains" if chosen.workers == 1 else "sustain"
    return f"{named(chosen)}{link} {verb} {plain(chosen.rate)} requests a second"


def _lost(wanted: Objectives, kept: Objectives) -> str:
    forms = {
        "first_block_s": "a first block within {} s",
        "gap_s": "gaps within {} s",
        "gap_ratio": "gaps within {} times the shortest",
    }
    lost = [
        forms[name].format(plain(getattr(wanted, name)))
        for name in wanted.__struct_fields__
        if getattr(wanted, name) != getattr(kept, name)
    ]
    return ", ".join(lost)


def _help(kept: Planner, chosen: Split) -> str:
    if not chosen.prefill:
        return "no other roles sustain more" if chosen.rate else "no roles meet the objectives"
    if chosen.share >= 0.005:
        return f"decode workers compute {chosen.share:.0%} of the prompts"
    if any(one.batch == chosen.batch and kept.most_help(one) > 0 for one in kept.fitting):
        return "decode workers compute no prompts, because they have no time left"
    if kept.mode == "remote":
        return "decode workers compute no prompts, because of --prefill remote"
    return (
        f"decode workers compute no prompts, because {plain(1e3 * kept.piece_s)} ms in one forward "
        "would lengthen gaps too much"
    )
