"""Draws the README's two pictures: blocks that fill in, from a real run, and goodput, from figures.

`python docs/pictures.py` starts a fleet of the bundled model, asks it one question, and writes
docs/blocks.svg and docs/goodput.svg.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.watch import Canvas, Style
from effuse.client.client import Client
from effuse.client.params import Params, make_request

DOCS: Final = Path(__file__).parent
RUN: Final = DOCS.parent / "benchmarks" / "gpu_fleet_h100.json"
QUESTION: Final = (
    "Tom has 3 boxes with 12 pens in each. He gives 7 pens away. How many pens are left?"
)
# The bundled model writes most blocks at once. Four forwards a block show how it denoises.
PARAMS: Final = Params(
    max_tokens=96, algorithm="block_diffusion", remasking="low_confidence_static",
    denoising_steps=4,
)  # fmt: skip
FIRST_S: Final = 1.0
"""Longest time to the first block that counts as served."""
GAPS: Final = 2.0
"""Longest 99th percentile of a request's gaps, in gaps of an idle fleet."""

FRAME_S, LAST_S = 0.22, 2.5
WIDTH, LINE, TOP, LEFT, COLUMNS = 720, 22, 46, 24, 76
COLORS: Final[dict[Style, str]] = {"final": "ink", "draft": "draft", "mask": "mask"}
STYLE: Final = """
.paper{fill:#fbfbfa;stroke:#d8d8d2}.ink{fill:#22242a}.draft{fill:#0b7fab}.mask{fill:#c3c6c9}
.soft{fill:#6d7178}.split{stroke:#0b7fab;fill:#0b7fab}.pair{stroke:#c2571a;fill:#c2571a}
.rule{stroke:#d8d8d2}text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}
.label{font:13px system-ui,sans-serif;stroke:none}
@media (prefers-color-scheme:dark){.paper{fill:#16181d;stroke:#32353c}.ink{fill:#e6e6e3}
.draft{fill:#5ec4ea}.mask{fill:#454a52}.soft{fill:#9aa0a8}.rule{stroke:#32353c}
.split{stroke:#5ec4ea;fill:#5ec4ea}.pair{stroke:#f0965a;fill:#f0965a}}
"""

Spans = Sequence[tuple[str, Style]]


def main() -> int:
    """Writes both pictures; returns the exit status."""
    frames = record()
    (DOCS / "blocks.svg").write_text(film(frames))
    (DOCS / "goodput.svg").write_text(chart(json.loads(RUN.read_text())))
    print(f"{len(frames)} frames of a real answer, and goodput from {RUN.name}")
    return 0


def record() -> list[Spans]:
    """The states of one real answer, from only masks to its end."""
    with Fleet(FleetConfig(worker_flags=("--device", "cpu"))) as fleet:
        return _record(fleet)


def _record(fleet: Fleet) -> list[Spans]:
    canvas, frames = Canvas(), list[Spans]()
    request = make_request(QUESTION, PARAMS, drafts=True)
    with Client(fleet.address) as client:
        for event in client.stream_of(request).events():
            canvas.apply(event)
            if (spans := canvas.spans()) and (not frames or frames[-1] != spans):
                frames.append(spans)
    return frames


def film(frames: Sequence[Spans]) -> str:
    """The states one after another, repeated for ever."""
    total_s = FRAME_S * len(frames) + LAST_S
    rows = max(len(list(_rows(spans))) for spans in frames)
    height = TOP + LINE * (rows + 1)
    groups = "".join(
        f'<g class="frame" style="animation-delay:{at * FRAME_S:.2f}s">{_text(spans)}</g>'
        for at, spans in enumerate(frames[:-1])
    )
    share, last = 100 * FRAME_S / total_s, 100 * (FRAME_S + LAST_S) / total_s
    begin = (len(frames) - 1) * FRAME_S
    style = (
        f"{STYLE}.frame,.last{{visibility:hidden;animation:f {total_s:.2f}s step-end infinite}}"
        f".last{{animation-name:l;animation-delay:{begin:.2f}s}}"
        f"@keyframes f{{0%{{visibility:visible}}{share:.3f}%{{visibility:hidden}}}}"
        f"@keyframes l{{0%{{visibility:visible}}{last:.3f}%{{visibility:hidden}}}}"
        "@media (prefers-reduced-motion:reduce){.frame{animation:none}"
        ".last{animation:none;visibility:visible}}"
    )
    about = f'<text x="{LEFT}" y="30" class="label soft">{escape(QUESTION)}</text>'
    body = f'{about}{groups}<g class="last">{_text(frames[-1])}</g>'
    return _svg(WIDTH, height, style, body, "Blocks of an answer, denoised several tokens at once")


def _rows(spans: Spans) -> Iterator[Spans]:
    """The spans line by line, none longer than `COLUMNS`."""
    row: list[tuple[str, Style]] = []
    width = 0
    for text, style in spans:
        for at, part in enumerate(text.split("\n")):
            if at:
                yield row
                row, width = [], 0
            while part:
                piece, part = part[: COLUMNS - width], part[COLUMNS - width :]
                row.append((piece, style))
                width += len(piece)
                if part:
                    yield row
                    row, width = [], 0
    yield row


def _text(spans: Spans) -> str:
    lines = []
    for at, row in enumerate(_rows(spans)):
        parts = "".join(
            f'<tspan class="{COLORS[style]}">{escape(text)}</tspan>' for text, style in row
        )
        lines.append(f'<text x="{LEFT}" y="{TOP + LINE * (at + 1) - 8}">{parts}</text>')
    return "".join(lines)


def chart(run: dict[str, Any]) -> str:
    """The share of requests within both limits by requests per second, for the split fleet and for
    the best co-located form at each rate.
    """
    alone = [gap for one in run["colocated"][0]["alone"][run["served"]] for gap in one["gaps"]]
    most = GAPS * sorted(alone)[len(alone) // 2]
    split, pair = (_best(run[name], most) for name in ("split", "colocated"))
    rates = sorted(split)

    def x(rate: float) -> float:
        return 70 + rate / max(rates) * 560

    def y(share: float) -> float:
        return 290 - share * 230

    body = "".join(
        f'<line class="rule" x1="70" x2="630" y1="{y(v):.0f}" y2="{y(v):.0f}"/>'
        f'<text class="label soft" x="60" y="{y(v) + 4:.0f}" text-anchor="end">{v:.0%}</text>'
        for v in (0.0, 0.5, 1.0)
    )
    body += "".join(
        f'<text class="label soft" x="{x(rate):.0f}" y="312" text-anchor="middle">{rate:g}</text>'
        for rate in rates
    )
    for name, values, about in (
        ("split", split, "one prefill and one decode worker"),
        ("pair", pair, "two workers that do both"),
    ):
        points = [(x(rate), y(values[rate])) for rate in rates]
        path = " ".join(f"{px:.0f},{py:.0f}" for px, py in points)
        body += f'<polyline class="{name}" points="{path}" style="fill:none;stroke-width:2.5"/>'
        body += "".join(
            f'<circle class="{name}" cx="{a:.0f}" cy="{b:.0f}" r="4"/>' for a, b in points
        )
        at = f'x="{points[-1][0] - 8:.0f}" y="{points[-1][1] + 24:.0f}" text-anchor="end"'
        body += f'<text class="label {name}" {at}>{about}</text>'
    body += (
        '<text class="label ink" x="24" y="30">Requests whose blocks come within two unloaded '
        "gaps, by requests a second that arrive</text>"
        f'<text class="label soft" x="70" y="340">{run["device"]} x 2, prompts of 2048 tokens, '
        "answers of 128</text>"
    )
    return _svg(680, 360, STYLE, body, "Goodput of a split fleet and of co-located workers")


def _best(fleets: Sequence[dict[str, Any]], most: float) -> dict[float, float]:
    found: dict[float, float] = {}
    for fleet in fleets:
        for one in fleet["arriving"]:
            good = sum(_is_good(each, most) for each in one["each"]) / one["requests"]
            found[one["rate"]] = max(found.get(one["rate"], 0.0), good)
    return found


def _is_good(each: dict[str, Any], most: float) -> bool:
    if each["failure"] or each["first_s"] > FIRST_S:
        return False
    gaps = sorted(each["gaps"])
    return not gaps or gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] <= most


def _svg(width: int, height: int, style: str, body: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><title>{title}</title><style>{style}</style>'
        f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
        f"{body}</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
