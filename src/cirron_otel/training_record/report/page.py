"""The page around a report: one file, no script, nothing fetched, light and dark, for print too.

The content security policy forbids scripts and everything from elsewhere, so that even a name that
escaped the escaping could do nothing.
"""

from __future__ import annotations

from cirron_otel.training_record.report import svg
from cirron_otel.training_record.report.layer_charts import LEVELS

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#5b636d;--rule:#e3e5e8;
--grid:#eceef0;--line:#2563c9;--band:#2563c933;--good:#18794e;--good-bg:#e9f6ee;--note:#8a5300;
--note-bg:#fdf3e1;--bad:#c01c2e;--bad-bg:#fdecec;--unknown:#5b636d;--unknown-bg:#eff1f3;
--alarm:#c25a00;--alarm-area:#f59e2a33;--certificate:#6d3fc4;--constant:#a588e0;--decayed:#d9a441;
--silent:#b9c0c8;--repair:#0b7f74;--spike:#b0246f;--cleared:#18794e;--zero:#e58a00}
@media (prefers-color-scheme:dark){:root{--bg:#121417;--card:#1a1d21;--ink:#e8eaed;--soft:#a0a8b2;
--rule:#2e333a;--grid:#262a30;--line:#6ba4ff;--band:#6ba4ff33;--good:#5fd19a;--good-bg:#12291f;
--note:#f2b556;--note-bg:#2e2413;--bad:#ff7a85;--bad-bg:#351a1d;--unknown:#a0a8b2;
--unknown-bg:#23272c;--alarm:#ff9d45;--alarm-area:#f59e2a2b;--certificate:#b294ff;
--constant:#7f66bf;--decayed:#c79a4a;--silent:#4c545e;--repair:#45cbbd;--spike:#ff7fc0;
--cleared:#5fd19a;--zero:#f0a030}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1040px;margin:0 auto;padding:28px 24px 56px}
h1{font-size:26px;line-height:1.2;margin:0;font-weight:650;letter-spacing:-.01em;
overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px;font-weight:650}
h3{font-size:14px;margin:20px 0 4px;font-weight:650}
p{margin:4px 0 10px;max-width:76ch}
a{color:var(--line)}
.sub-title{color:var(--soft);margin:4px 0 0;overflow-wrap:anywhere}
.say{color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px;margin:16px 0}
.state{border-left:5px solid currentColor;border-radius:8px;padding:12px 16px;margin:18px 0 0}
.state strong{font-size:18px;display:block}
.state span{color:var(--ink)}
.good{color:var(--good);background:var(--good-bg)}.note{color:var(--note);background:var(--note-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
.unknown{color:var(--unknown);background:var(--unknown-bg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:0;
background:var(--card);border:1px solid var(--rule);border-radius:10px;overflow:hidden;
margin:16px 0}
.tiles div{box-shadow:0 0 0 .5px var(--rule);padding:11px 16px}
.tiles dt{color:var(--soft);font-size:12.5px}
.tiles dd{margin:0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.tiles small{display:block;color:var(--soft);font-size:12px;font-weight:400}
dl{margin:0}
.facts{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;gap:3px 18px;font-size:14px}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr));gap:8px 36px}
.scroll,.chart{overflow-x:auto}
.chart svg{display:block;width:100%;min-width:660px;height:auto}
.chart{margin:10px 0 0}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:12.5px;vertical-align:bottom}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{overflow-wrap:anywhere}td.l{min-width:11em}td.w,th.w{white-space:nowrap;overflow-wrap:normal}
tr:last-child td{border-bottom:0}
code{font:12.5px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace;
overflow-wrap:anywhere}
.tag{display:inline-block;white-space:nowrap;font-size:12px;font-weight:600;border-radius:4px;
padding:0 6px}
.t-critical,.t-fail{color:var(--bad);background:var(--bad-bg)}
.t-warning{color:var(--note);background:var(--note-bg)}
.t-pass,.t-action{color:var(--good);background:var(--good-bg)}
.t-proof{color:var(--certificate);background:var(--unknown-bg)}
.t-note,.t-info,.t-absent,.t-skipped,.t-unchecked{color:var(--unknown);background:var(--unknown-bg)}
footer{color:var(--soft);font-size:13px;margin-top:24px}
ul{margin:4px 0 8px;padding-left:20px}li{margin:2px 0;overflow-wrap:anywhere}
svg text{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
fill:var(--ink)}
svg .tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
svg .axis,svg .sub{fill:var(--soft);font-size:10.5px}svg .lane{font-size:11px;fill:var(--soft)}
svg .small{font-size:10.5px}
.grid{stroke:var(--grid);fill:none}.base{stroke:var(--rule);fill:none}
.lane-line{stroke:var(--rule);stroke-dasharray:1 4;fill:none}
.drop{stroke:var(--soft);stroke-opacity:.35;stroke-dasharray:2 3;fill:none}
.line{fill:none;stroke:var(--line);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.thin{stroke-width:1.4}.band{fill:var(--band)}.ribbon{stroke:var(--band);stroke-width:3;fill:none}
.best{fill:var(--card);stroke:var(--line);stroke-width:1.8}
.g{stroke:var(--card);stroke-width:1}.g-alarm{fill:var(--alarm)}.g-channels{fill:var(--decayed)}
.g-certificate{fill:var(--certificate)}.g-repair{fill:var(--repair)}.g-spike{fill:var(--spike)}
.g-nonfinite{fill:var(--bad)}.g-cleared{fill:var(--cleared)}.g-other{fill:var(--soft)}
.bad-area{fill:url(#hatch-bad)}.bad-text{fill:var(--bad);font-weight:600;paint-order:stroke;
stroke:var(--card);stroke-width:4px}
.alarm-area{fill:var(--alarm-area)}.alarm-box{fill:none;stroke:var(--ink);stroke-width:1.1}
.zero{stroke:var(--zero);stroke-width:2.4;fill:none}
.map,.k{shape-rendering:crispEdges}.hover{fill:transparent}
.hz{fill:var(--zero)}.hb{fill:var(--bad)}
.k-certified{fill:var(--certificate)}.k-constant{fill:var(--constant)}
.k-decayed{fill:var(--decayed)}.k-silent{fill:var(--silent)}
.bar{stroke:var(--card);stroke-width:.5;fill:var(--soft)}
.b-no_gradient{fill:var(--zero)}.b-vanishing{fill:url(#hatch-vanishing)}
.b-exploding{fill:url(#hatch-exploding)}.b-stuck{fill:var(--certificate)}
.b-loss_spike{fill:var(--spike)}.b-bad{fill:var(--bad)}.arrow{fill:var(--soft)}
svg .on-bar{font-size:10.5px;font-weight:600;fill:var(--ink);paint-order:stroke;
stroke:var(--card);stroke-width:3px}
.hidden-defs{position:absolute;width:0;height:0}
details{margin-top:10px}summary{cursor:pointer;color:var(--line);font-size:14px;padding:4px 0}
@media (max-width:640px){main{padding:18px 12px 40px}section{padding:14px 13px}h1{font-size:22px}
.facts{grid-template-columns:1fr;gap:0}.facts dd{margin-bottom:6px}
.tiles{grid-template-columns:repeat(2,1fr)}.tiles div{padding:9px 12px}.tiles dd{font-size:18px}}
@media print{@page{margin:14mm}:root{color-scheme:light}body{background:#fff;font-size:11.5px}
main{max-width:none;padding:0}section{border:0;padding:6px 0;margin:8px 0;break-inside:auto}
.chart,tr,.tiles,.state{break-inside:avoid}h2,h3{break-after:avoid}.chart svg{min-width:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

_DEFS = """<svg class="hidden-defs" aria-hidden="true"><defs>
<pattern id="hatch-bad" width="7" height="7" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><path d="M0 0H7V7H0Z" style="fill:var(--bad-bg)"/>
<path d="M0 0V7" style="stroke:var(--bad);stroke-opacity:.45" stroke-width="2"/></pattern>
<pattern id="hatch-vanishing" width="5" height="5" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><path d="M0 0H5V5H0Z" style="fill:var(--alarm-area)"/>
<path d="M0 0V5" style="stroke:var(--alarm)" stroke-width="3"/></pattern>
<pattern id="hatch-exploding" width="5" height="5" patternUnits="userSpaceOnUse">
<path d="M0 0H5V5H0Z" style="fill:var(--alarm-area)"/>
<path d="M0 2.5H5" style="stroke:var(--bad)" stroke-width="2.4"/></pattern></defs></svg>"""

_LIGHT = ((223, 234, 248), (96, 150, 220), (9, 46, 102))
_DARK = ((31, 43, 62), (58, 108, 180), (190, 222, 255))


def _ramp(stops: tuple[tuple[int, int, int], ...]) -> str:
    """The heat map's colours from pale to strong, as CSS."""
    rules = []
    for level in range(LEVELS):
        at = level / (LEVELS - 1) * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        mixed = (
            round(a + (b - a) * (at - low)) for a, b in zip(stops[low], stops[low + 1], strict=True)
        )
        rules.append(f".h{level}{{fill:#{''.join(f'{part:02x}' for part in mixed)}}}")
    return "".join(rules)


def page(title: str, body: str, *, style: str = "") -> str:
    """A whole HTML document around ``body``, which is HTML already."""
    heat = f"{_ramp(_LIGHT)}@media (prefers-color-scheme:dark){{{_ramp(_DARK)}}}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="referrer" content="no-referrer">'
        f"<title>{svg.esc(title)}</title><style>{_STYLE}{heat}{style}</style></head>"
        f"<body>{_DEFS}<main>{body}</main></body></html>\n"
    )


def tag(kind: str, word: str | None = None) -> str:
    """A small label whose colour repeats what its word says."""
    return f'<span class="tag t-{svg.esc(kind)}">{svg.esc(word or kind)}</span>'


def facts(pairs: list[tuple[str, str]]) -> str:
    """Names and values side by side; text is escaped here."""
    rows = "".join(f"<dt>{svg.esc(name)}</dt><dd>{svg.esc(value)}</dd>" for name, value in pairs)
    return f'<dl class="facts">{rows}</dl>'


def table(heads: list[tuple[str, str]], rows: list[list[str]]) -> str:
    """A table; heads are ``(text, class)``, cells are HTML already."""
    head = "".join(f'<th scope="col"{_class(kind)}>{svg.esc(name)}</th>' for name, kind in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(kind)}>{cell}</td>" for cell, (_, kind) in zip(row, heads, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def folded(heads: list[tuple[str, str]], rows: list[list[str]], shown: int, rest: str) -> str:
    """A table of which only the first rows are open; the others wait behind ``rest``."""
    if len(rows) <= shown + shown // 2:
        return table(heads, rows)
    closed = table(heads, rows[shown:])
    return (
        f"{table(heads, rows[:shown])}<details><summary>{svg.esc(rest)}</summary>{closed}</details>"
    )


def section(title: str, body: str, say: str = "", anchor: str = "") -> str:
    """A section with its heading and a line that says how to read it."""
    name = f' id="{anchor}"' if anchor else ""
    told = f'<p class="say">{svg.esc(say)}</p>' if say else ""
    return f"<section{name}><h2>{svg.esc(title)}</h2>{told}{body}</section>"


def items(entries: list[str]) -> str:
    """A list; text is escaped here."""
    return "<ul>" + "".join(f"<li>{svg.esc(entry)}</li>" for entry in entries) + "</ul>"
