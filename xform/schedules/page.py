"""A schedule on an HTML page that stands alone: no other file, no network, no script.

The table has a row a stage and a column a tick, colours for what runs, and in each cell the number of the
microbatch; deeper shades are later chunks. Below it stands how many values travel after each tick.
"""

from __future__ import annotations

import html as escaping

from xform.printing.page import CSS
from xform.schedules import drawing
from xform.schedules.checks import NAMES
from xform.schedules.costs import Cost, Direction, Send
from xform.schedules.table import Kind, Schedule, Work

LOOKS = """
main { padding-bottom: 32px; }
.wide { overflow-x: auto; padding: 6px 18px 4px; }
.ticks { border-collapse: separate; border-spacing: 1px; font: 12.5px/1.6 ui-monospace, Menlo, monospace; }
.ticks th { font-weight: 400; color: var(--soft); text-align: right; padding: 0 4px; }
.ticks th:first-child { text-align: left; padding: 0 12px 0 0; white-space: nowrap; position: sticky; left: 0;
  background: var(--bg); }
.ticks td { min-width: 24px; text-align: center; padding: 0 3px; border-radius: 3px; color: #14181f; }
.ticks td.idle, .key.idle { background: color-mix(in srgb, var(--line) 45%, var(--bg)); }
.ticks td.sent { color: var(--soft); }
.forward { --c: #7fb2f5; } .backward { --c: #79cf92; } .input { --c: #5cc4bd; } .weight { --c: #f0b661; }
.forward, .backward, .input, .weight { background: color-mix(in srgb, var(--c), #20242c var(--k, 0%)); }
.key { display: inline-block; width: 22px; height: 14px; border-radius: 3px; margin: 0 6px 0 16px;
  vertical-align: -2px; border: 1px solid var(--line); } .key:first-child { margin-left: 0; }
"""

DEEPEST = 30
"""How much darker the last chunk is than the first, in percent."""

ORDER: tuple[Kind, ...] = ("forward", "backward", "input", "weight")


def page(schedule: Schedule, cost: Cost) -> str:
    """The page of a schedule and what it takes."""
    title = schedule.title()
    kept = max(cost.alive)
    head = (
        f"{cost.idle} of {cost.slots} slots are idle, {drawing.percent(cost.bubble)}; a stage keeps at most "
        f"{kept} {'input' if kept == 1 else 'inputs'} of a chunk for the backward pass."
    )
    said = "".join(f"<li>{_e(line)}</li>" for line in drawing.figures(schedule, cost))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_e(title)}</title><style>{CSS}{LOOKS}</style></head><body>",
            f"<header><h1>{_e(title)}</h1><p>{_e(head)}</p></header><main><section>",
            f'<div class="head">{_legend(schedule)}</div>',
            f'<div class="body"><div class="wide">{_table(schedule, cost)}</div></div></section>',
            f'<ul class="notes">{said}</ul></main></body></html>\n',
        ]
    )


def _legend(schedule: Schedule) -> str:
    used = {work.kind for _, _, work in schedule.works()}
    keys = [f'<span class="key {kind}"></span>{NAMES[kind]}' for kind in ORDER if kind in used]
    chunks = " Darker cells are later chunks." if schedule.repeats > 1 else ""
    said = (
        "A row is a stage, a column a tick, the number in a cell the microbatch that runs; point at a cell "
        f"to read it in words.{chunks} The last rows count what is sent on after each tick."
    )
    return f'<div>{"".join(keys)}<span class="key idle"></span>idle</div><p class="soft">{said}</p>'


def _table(schedule: Schedule, cost: Cost) -> str:
    sent = {(send.tick, send.source): send for send in cost.sends}
    heads = "".join(f"<th>{tick}</th>" for tick in range(schedule.ticks))
    rows = [f"<tr><th>tick</th>{heads}</tr>"]
    for stage, works in enumerate(zip(*schedule.table, strict=True)):
        cells = [
            _cell(schedule, tick, stage, work, sent.get((tick, stage))) for tick, work in enumerate(works)
        ]
        rows.append(f"<tr><th>stage {stage}</th>{''.join(cells)}</tr>")
    ways: tuple[tuple[Direction, str], ...] = (("next", "to the next"), ("previous", "to the previous"))
    for way, name in ways:
        counts = [0] * schedule.ticks
        for send in cost.sends:
            counts[send.tick] += send.direction == way
        cells = [f'<td class="sent">{count or ""}</td>' for count in counts]
        rows.append(f"<tr><th>{name}</th>{''.join(cells)}</tr>")
    return f'<table class="ticks">{"".join(rows)}</table>'


def _cell(schedule: Schedule, tick: int, stage: int, work: Work | None, sent: Send | None) -> str:
    if work is None:
        return f'<td class="idle" title="tick {tick}, stage {stage}: idle"></td>'
    block = work.chunk * schedule.stages + stage
    said = f"tick {tick}, stage {stage}: {NAMES[work.kind]}, microbatch {work.microbatch}, block {block}"
    said += f"; goes to stage {sent.target}" if sent is not None else ""
    shade = round(DEEPEST * work.chunk / max(1, schedule.repeats - 1))
    style = f' style="--k: {shade}%"' if shade else ""
    return f'<td class="{work.kind}"{style} title="{_e(said)}">{work.microbatch}</td>'


def _e(text: str) -> str:
    return escaping.escape(text)
