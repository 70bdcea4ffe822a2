"""Self-contained HTML pages: a themed skeleton, cards, tables, pictures and numbers as text; no network, no library."""

import base64
import dataclasses
import html
import io
import pathlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from jepa_jax.base.text import duration, number, percent, short

__all__ = ["duration", "number", "percent", "short"]
WIDE_CARD = '<div class="card wide">'
LARGEST_IMAGE = 700_000  # bytes; a larger picture is embedded as JPEG


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page; an empty title leaves it without a heading and out of the navigation."""

    title: str
    body: str


def escape(value: Any) -> str:
    # A lone surrogate (a file name that is not UTF-8) could not be written to the page.
    return html.escape(str(value), quote=True).encode("utf-8", "replace").decode()


def absent(text: str) -> str:
    """Says in words that something is not there."""
    return f'<p class="absent">{escape(text)}</p>'


def card(title: str, body: str, note: str = "", wide: bool = False) -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    footer = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="card{" wide" if wide else ""}">{heading}{body}{footer}</div>'


def grid(cards: Iterable[str]) -> str:
    """Two cards a row on a wide screen; one that would stand alone in the last row fills it."""
    cards = [c for c in cards if c]
    if cards and sum(not c.startswith(WIDE_CARD) for c in cards) % 2:
        cards[-1] = cards[-1].replace('<div class="card">', WIDE_CARD, 1)
    return f'<div class="grid">{"".join(cards)}</div>'


def figures(items: Iterable[tuple[str, str, str, str]]) -> str:
    """Large figures in a row: (kind: "main" or "", label, value, note)."""
    cards = (
        f'<div class="kpi {kind}"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for kind, label, value, note in items
    )
    return f'<div class="kpis">{"".join(cards)}</div>'


def table(rows: Iterable[Sequence[Any]], header: Sequence[str] = (), marked: Iterable[int] = ()) -> str:
    """Rows of cells (escaped); numbers align right, `marked` rows stand out."""
    marked = set(marked)

    def cell(value, tag="td"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        text = short(value) if is_number else escape("–" if value is None else value)
        return f"<{tag}{' class=num' if is_number else ''}>{text}</{tag}>"

    head = f"<thead><tr>{''.join(cell(h, 'th') for h in header)}</tr></thead>" if header else ""
    body = "".join(
        f"<tr{' class=marked' if i in marked else ''}>{''.join(map(cell, row))}</tr>" for i, row in enumerate(rows)
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def details(title: str, body: str, preview: str = "", is_open: bool = True) -> str:
    preview = f'<span class="preview">{escape(preview)}</span>' if preview else ""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}{preview}</summary>{body}</details>"


def image(path: pathlib.Path, alt: str) -> str:
    """A PNG embedded in the page, enlarged by a whole factor while it stays narrow."""
    data = path.read_bytes()
    if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
        return absent(f"{path.name} is not a PNG picture.")
    width, height = struct.unpack(">II", data[16:24])
    kind = "png"
    if len(data) > LARGEST_IMAGE:
        data, kind = _as_jpeg(data), "jpeg"
    shown = width * max(1, min(800 // max(width, 1), 640 // max(height, 1)))
    return (
        f'<img class="pixels" alt="{escape(alt)}" width="{width}" height="{height}" style="width:min(100%,{shown}px)" '
        f'src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'
    )


def _as_jpeg(png: bytes) -> bytes:
    import PIL.Image

    out = io.BytesIO()
    with PIL.Image.open(io.BytesIO(png)) as file:
        picture = file.convert("RGB")
    picture.thumbnail((1600, 1600))
    picture.save(out, "JPEG", quality=85)
    return out.getvalue()


def page(title: str, header: str, sections: Iterable[Section], footer: str = "") -> str:
    """The whole document; the content policy forbids every request, so the page cannot depend on a network."""
    sections = list(sections)
    links = "".join(f'<a href="#part{i}">{escape(s.title)}</a>' for i, s in enumerate(sections) if s.title)
    parts = "".join(
        f'<section id="part{i}">{f"<h2>{escape(s.title)}</h2>" if s.title else ""}{s.body}</section>'
        for i, s in enumerate(sections)
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><header>{header}<nav>{links}</nav></header>\n<main>{parts}</main>\n<footer>{footer}</footer>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#16191f;--soft:#5b6472;--faint:#8b94a3;--line:#e3e6eb;
--accent:#2456c8;--accent-soft:#e8eefb;--good:#0f7b55;--good-soft:#e2f4ec;--warn:#9a5b00;--warn-soft:#fcf0dc;
--bad:#c22f2f;--bad-soft:#fbe9e9;--shadow:0 1px 2px #1018280d,0 1px 3px #10182814;--c0:#2456c8;--c1:#d9622b;
--c2:#128a6b;--c3:#9b3fb0;--c4:#b48a00;--c5:#0e8fb5;--c6:#c2325f;--c7:#6b7280}@media(prefers-color-scheme:dark){
:root{--bg:#0e1116;--card:#161a21;--ink:#e7eaf0;--soft:#a3acba;--faint:#727c8c;--line:#272d37;--accent:#7aa2ff;
--accent-soft:#1b2640;--good:#4fce9d;--good-soft:#12291f;--warn:#e9b45c;--warn-soft:#2d2312;--bad:#ff7d7d;
--bad-soft:#331819;--shadow:none;--c0:#7aa2ff;--c1:#ff9a62;--c2:#4fce9d;--c3:#d48ae6;--c4:#e3c04f;--c5:#5cc8ea;
--c6:#ff7fa6;--c7:#a3acba}}*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Inter,Roboto,"Helvetica Neue",sans-serif;
-webkit-font-smoothing:antialiased}header,main,footer{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:36px}h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;margin:40px 0 14px}h3{font-size:14px;font-weight:600;margin:0 0 10px}
p{margin:0 0 8px}.sub{color:var(--soft)}
.sub code,td code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:18px;padding-bottom:12px;border-bottom:1px solid var(--line)}
nav a{color:var(--soft);text-decoration:none;font-size:14px}nav a:hover{color:var(--accent)}
.pill{display:inline-block;font-size:12.5px;font-weight:600;padding:2px 10px;border-radius:99px;vertical-align:5px;
margin-left:10px;letter-spacing:0;background:var(--accent-soft);color:var(--accent)}
.pill.good{background:var(--good-soft);color:var(--good)}.pill.warn{background:var(--warn-soft);color:var(--warn)}
.pill.bad{background:var(--bad-soft);color:var(--bad)}
.kpis{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:14px;margin-top:24px}
.kpi,.card{background:var(--card);border:1px solid var(--line);border-radius:12px;box-shadow:var(--shadow);
padding:16px 18px;min-width:0}.kpi span{display:block;color:var(--soft);font-size:13px}
.kpi b{display:block;font-size:25px;line-height:1.3;font-weight:650;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}.kpi.main b{color:var(--accent)}.kpi small{color:var(--faint);font-size:12.5px}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}.wide{grid-column:1/-1}
.kpis+.card{margin-top:14px}.note{color:var(--faint);font-size:12.5px;margin:8px 0 0}.note+.note{margin-top:0}
.absent{color:var(--soft);font-style:italic;margin:0}figure{margin:0}
figcaption{display:flex;align-items:baseline;gap:8px}figcaption h3{margin:0 0 12px}
.unit{color:var(--faint);font-size:12.5px}.toggle{margin-left:auto}
button{font:inherit;font-size:12px;color:var(--soft);background:none;border:1px solid var(--line);border-radius:6px;
padding:1px 9px;cursor:pointer}button:hover{color:var(--ink)}
.log .toggle{background:var(--accent-soft);color:var(--accent)}
.plot{position:relative;height:215px;margin:4px 10px 40px 46px;touch-action:pan-y}
.layer,.layer svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.layer.log,.chart.log .layer.lin{display:none}.chart.log .layer.log{display:block}
.plot span{position:absolute;font-size:11.5px;line-height:1;color:var(--faint);white-space:nowrap;
font-variant-numeric:tabular-nums}span.y{right:calc(100% + 8px);transform:translateY(-50%)}
.plot span.level{right:2px;transform:translateY(-120%);color:var(--soft)}
span.x{top:calc(100% + 7px);transform:translateX(-50%)}
span.xlabel{top:calc(100% + 24px);left:50%;transform:translateX(-50%)}
svg path{fill:none;vector-effect:non-scaling-stroke;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;
stroke-linecap:round}svg .gridline{color:var(--line);stroke-width:1}
svg .level{color:var(--faint);stroke-width:1.2;stroke-dasharray:4 4}svg .raw{opacity:.28;stroke-width:1}
svg .dots{stroke-width:6.5}svg .bad{color:var(--bad)}.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}
.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}.s6{color:var(--c6)}.s7{color:var(--c7)}
svg .off{display:none}.legend{display:flex;flex-wrap:wrap;gap:2px 14px}
.key{border:0;padding:0;display:flex;align-items:center;gap:6px;font-size:12.5px}
.key:before{content:"";width:12px;height:3px;border-radius:2px;background:currentColor}
.key[aria-pressed=false]{opacity:.35;text-decoration:line-through}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--faint);pointer-events:none}
.dot{position:absolute;width:8px;height:8px;margin:-4px;border-radius:9px;background:currentColor;
border:1.5px solid var(--card);pointer-events:none}
.tip{position:absolute;z-index:2;top:-6px;padding:7px 10px;border-radius:8px;background:var(--card);color:var(--ink);
border:1px solid var(--line);box-shadow:0 4px 14px #0003;font-size:12.5px;white-space:nowrap;pointer-events:none;
font-variant-numeric:tabular-nums}.tip div:first-child{color:var(--soft)}.tip div{display:flex;gap:18px}
.tip b{margin-left:auto}.bars{display:grid;gap:7px}.group{font-size:12.5px;color:var(--soft);margin-top:10px}
.group:first-child{margin-top:0}
.bar{display:grid;grid-template-columns:minmax(120px,270px) 1fr 62px;gap:14px;align-items:center}
.bar .label{font-size:13.5px;line-height:1.25}.bar small{display:block;color:var(--faint);font-size:12px}
.bar b{text-align:right;font-variant-numeric:tabular-nums;font-size:13.5px}
.track{height:18px;border-radius:5px;background:var(--bg);overflow:hidden}
.track i{display:block;height:100%;border-radius:5px;background:var(--faint);opacity:.55}
.main .track i{background:var(--accent);opacity:1}.run .track i{background:var(--accent);opacity:.5}
.main b{color:var(--accent)}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{padding:5px 10px 5px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}th{color:var(--soft);font-weight:600;white-space:nowrap}tr:last-child td{border-bottom:0}
.num,th.num{text-align:right;font-variant-numeric:tabular-nums}.marked td{font-weight:650;color:var(--accent)}
.pairs td:first-child{color:var(--soft);width:44%}.pairs td:last-child{font-variant-numeric:tabular-nums}
.columns{columns:2;column-gap:16px}.columns>*{break-inside:avoid;margin-bottom:16px}
details{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:10px 18px;
box-shadow:var(--shadow)}summary{cursor:pointer;font-weight:600;font-size:14px;padding:3px 0}
details[open] .preview{display:none}.preview{color:var(--faint);font-weight:400;margin-left:10px;font-size:12.5px}
.pixels{image-rendering:pixelated;height:auto;border-radius:6px;display:block}
footer{color:var(--faint);font-size:12.5px;padding-top:32px;padding-bottom:40px}@media(max-width:820px){
.grid{grid-template-columns:minmax(0,1fr)}.columns{columns:1}header,main,footer{padding-left:14px;padding-right:14px}
.bar{grid-template-columns:minmax(96px,34%) 1fr 56px;gap:8px}h1{font-size:24px}}@media print{
body{background:#fff}.card,.kpi,details{break-inside:avoid;box-shadow:none}nav,button.toggle{display:none}}
"""

# Makes the figures of charts.py answer to the pointer; without a chart on the page it does nothing.
SCRIPT = """
const text = v => Number.isInteger(v) || Math.abs(v) >= 1e4 ? v.toLocaleString("en") : String(+v.toPrecision(5));
const add = (parent, name) => {
  const element = parent.appendChild(document.createElement("div"));
  element.className = name;
  return element;
};
document.querySelectorAll(".chart").forEach(chart => {
  const data = JSON.parse(chart.querySelector("script").textContent), plot = chart.querySelector(".plot");
  const hidden = new Set(), extras = [];
  const toggle = chart.querySelector(".toggle");
  if (toggle) toggle.onclick = () => chart.classList.toggle("log");
  chart.querySelectorAll(".key").forEach(key => key.onclick = () => {
    const on = key.getAttribute("aria-pressed") === "false", s = +key.dataset.s;
    key.setAttribute("aria-pressed", on);
    on ? hidden.delete(s) : hidden.add(s);
    chart.querySelectorAll("path[data-s='" + s + "']").forEach(p => p.classList.toggle("off", !on));
  });
  const clear = () => { while (extras.length) extras.pop().remove() };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; xs[mid] < x ? low = mid : high = mid }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  plot.onpointerleave = clear;
  plot.onpointermove = event => {
    clear();
    const box = plot.getBoundingClientRect(), [x0, x1] = data.x;
    const x = x0 + (x1 - x0) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const isLog = chart.classList.contains("log"), [y0, y1] = data.scales[isLog ? "log" : "lin"];
    const hits = data.series.map((s, i) => ({i, s, k: nearest(s.x, x)})).filter(h => h.s.x.length && !hidden.has(h.i));
    if (!hits.length) return;
    const at = hits.map(h => h.s.x[h.k]).reduce((a, b) => Math.abs(a - x) <= Math.abs(b - x) ? a : b);
    const near = hits.filter(h => Math.abs(h.s.x[h.k] - at) <= .03 * (x1 - x0));
    const left = 100 * (at - x0) / (x1 - x0), shown = data.xlog ? +(10 ** at).toPrecision(5) : at;
    const cursor = add(plot, "cursor"), tip = add(plot, "tip");
    extras.push(cursor, tip);
    cursor.style.left = left + "%";
    tip.style[left > 55 ? "right" : "left"] = "calc(" + (left > 55 ? 100 - left : left) + "% + 10px)";
    const second = data.per ? " · " + data.per[0] + " " + (at * data.per[1]).toFixed(2) : "";
    add(tip, "").textContent = data.xname + " " + text(shown) + second;
    for (const {i, s, k} of near) {
      const row = add(tip, "s" + i % 8), y = s.y[k], top = ((isLog ? Math.log10(y) : y) - y0) / (y1 - y0);
      row.textContent = s.name;
      row.appendChild(document.createElement("b")).textContent = text(y);
      if (!isFinite(top)) continue;
      const dot = add(plot, "dot s" + i % 8);
      dot.style.left = 100 * (s.x[k] - x0) / (x1 - x0) + "%";
      dot.style.top = 100 * (1 - top) + "%";
      extras.push(dot);
    }
  };
});
"""
