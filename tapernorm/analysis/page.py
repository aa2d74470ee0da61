"""The report as one HTML file that needs nothing else: styles, scripts, plotly and all data are inside."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from tapernorm.analysis import charts
from tapernorm.analysis.compare import Comparison, state_of, uncounted
from tapernorm.analysis.tables import RULE, headline, tables
from tapernorm.runtime.record import finite


def render(comparison: Comparison, title: str, now: datetime) -> str:
    """The whole file. Every text from a run goes through JSON and the DOM's text nodes, never into markup."""
    alone = comparison.runs[0] if len(comparison.runs) == 1 else None
    apart = list(uncounted(comparison)) if alone is None else [] if alone.status == "finished" else [state_of(alone)]
    data = charts.payload(comparison) | {
        "title": title,
        "written": f"{now:%Y-%m-%d %H:%M:%S}",
        "headline": headline(comparison),
        "rule": RULE,
        "tables": [asdict(table) for table in tables(comparison)],
        "uncounted": apart,
    }
    data["notes"] = charts.notes(data["runs"])
    files = {name: _text(f"page.{name}") for name in ("html", "css", "js")}
    return Template(files["html"]).substitute(
        title=html.escape(title),
        style=files["css"],
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        data=embed(data),
        script=files["js"],
    )


def embed(data: Any) -> str:
    """JSON for a <script> element: no character in it can end the element or start a comment."""
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _text(name: str) -> str:
    return resources.files("tapernorm.analysis").joinpath(name).read_text(encoding="utf-8")


def markdown(comparison: Comparison, title: str, now: datetime, images: Sequence[str]) -> str:
    """The same tables and verdicts as text."""
    lines = [
        f"# {_cell(title)}",
        "",
        f"{now:%Y-%m-%d %H:%M:%S}",
        "",
        f"**{_cell(headline(comparison))}**",
        "",
        RULE,
        "",
    ]
    for image in images:
        lines += [f"![{image.removesuffix('.png')}]({image})", ""]
    if apart := list(uncounted(comparison)):
        lines += ["Not in the means:", "", *(f"- {_cell(line)}" for line in apart), ""]
    for table in tables(comparison):
        rules = ["---" if side == "l" else "---:" for side in table.align]
        rows = [table.columns, rules, *table.rows]
        lines += [f"## {_cell(table.title)}", "", table.note, ""]
        lines += [f"| {' | '.join(_cell(cell) if row is not rules else cell for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that stays in its table cell and is no markup."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
