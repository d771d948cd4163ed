"""The reports as HTML and Markdown."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.training_record.report import (
    html,
    load,
    markdown,
    summary,
    summary_markdown,
    to_dict,
)
from record_by_hand import RecordWriter, alarm, channels, healthy, lesioned

HOSTILE = "<script>alert(1)</script>\"'`|&]]>\u202e\x1b[31m\n# x"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in order, and what it loads or runs."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an opened tag."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Every closing tag closes the innermost open one."""
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that is closed at once."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """Gather what a reader sees, and the styles."""
        self.words += data


def checked(content: str) -> Page:
    """A page that is well formed, loads nothing and runs nothing; its drawings are numbers."""
    page = Page(content)
    assert "script" not in page.tags
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in {"src", "href", "xlink:href", "action", "srcset"}
        if name in {"d", "x", "y", "width", "height", "transform", "viewbox"}:
            assert "nan" not in str(value).lower()
            assert "inf" not in str(value).lower()
    assert "@import" not in content
    assert not re.search(r"url\((?!#)", content)
    for drawing in re.findall(r"<svg.*?</svg>", content, re.DOTALL):
        ET.fromstring(drawing)  # noqa: S314 - our own text
    return page


def test_a_report_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    """The page is well formed, has its sections, and needs neither scripts nor a network."""
    content = html(load(lesioned(tmp_path, mend=True)))
    page = checked(content)
    for title in ("Loss", "Gradient norm per layer", "Stuck channels per layer", "Episodes"):
        assert f"<h2>{title}</h2>" in content
    assert "A problem was found and repaired" in page.words
    assert "default-src 'none'" in content
    assert "prefers-color-scheme:dark" in content


def test_every_chart_is_named_and_described(tmp_path: Path) -> None:
    """Who does not see a chart is told what it shows."""
    content = html(load(lesioned(tmp_path, mend=False)))
    charts = re.findall(r"<svg viewBox.*?</svg>", content, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        root = ET.fromstring(chart)  # noqa: S314 - our own text
        assert root.get("role") == "img"
        assert root.findtext("title")
        assert root.findtext("desc")


@pytest.mark.parametrize("make", [html, summary])
def test_a_record_that_does_not_verify_says_so_first(tmp_path: Path, make: object) -> None:
    """The first thing on the page is that the record cannot be believed."""
    lesioned(tmp_path, mend=True)
    diary = tmp_path / "diary.jsonl"
    diary.write_text(diary.read_text().replace('"count": 16', '"count": 61'))
    words = checked(make(load(tmp_path))).words
    assert words.index("The record does not verify") < words.index("61")
    assert words.index("was edited") < words.index(
        "What this does not tell" if make is summary else "What was found"
    )


def test_a_record_without_an_end_says_so(tmp_path: Path) -> None:
    """An unfinished record is reported on, and named unfinished in every form."""
    run = load(healthy(tmp_path).stop())
    for told in (html(run), summary(run), markdown(run), summary_markdown(run)):
        assert "The record has no end" in told


def hostile_record(directory: Path, text: str) -> Path:
    """A record whose every text is hostile."""
    start = dict.fromkeys(
        ("name", "tool", "model", "python", "torch", "platform", "optimizer"), text
    )
    writer = RecordWriter(directory, **start, **{text or "x": {text: [text]}})
    writer.manifest(text, notes=[text], precision={text: text})
    alarm(writer, 5, text)
    channels(writer, 5, text, 3)
    writer.event("sink_error", sink=text, error=text)
    writer.event("nonfinite_gradient", step=5, severity="critical", layers=[text])
    finding = {"kind": text, "severity": "warning", "layer": text, "message": text}
    for step in (0, 5, 10):
        row = ({text: 0.1}, {text: [step, 0, 0, 0]})
        writer.row(step, 1.0, *row, findings=[finding])
    return writer.end(error=text)


def test_hostile_texts_are_only_shown(tmp_path: Path) -> None:
    """Names that are markup, control characters or Markdown stay text in every form."""
    run = load(hostile_record(tmp_path, HOSTILE))
    for content in (html(run), summary(run)):
        page = checked(content)
        assert "<script>alert(1)" in page.words
        assert "\x1b" not in content
        assert "\u202e" not in content
    for content in (markdown(run), summary_markdown(run)):
        assert not re.search(r"(?<!\\)<", content)
        assert "\x1b" not in content
        assert not re.search(r"^# x", content, re.MULTILINE)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_any_text_gives_a_whole_page(tmp_path: Path, text: str) -> None:
    """Whatever the layers are called, the page is well formed."""
    checked(html(load(hostile_record(tmp_path, text))))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324, 2**63]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *("step", "layer", "severity", "count", "channels", "n_certified", "diagnosis", "value"),
        *("layers", "baseline", "grad_norm", "steps", "checks", "config", "producers"),
        *("optimizer", "time", "seq", "name", "relative_change", "batchnorm", "caused_by"),
    ]
)
EVENTS = st.sampled_from(
    [
        *("run_start", "manifest", "alarm", "alarm_cleared", "channels", "repair", "loss_spike"),
        *("loss_recovered", "nonfinite_gradient", "certificate", "run_end", "new", "structure"),
        *("skipped_step", "certificate_refused", "sink_error"),
    ]
)
LINES = st.builds(
    lambda fields, event: {**fields, "event": event},
    st.dictionaries(FIELDS, JSON),
    EVENTS | JSON,
)
ROWS = st.fixed_dictionaries(
    {
        "step": st.integers(0, 50) | JSON,
        "loss": st.floats() | JSON,
        "grad": st.dictionaries(st.sampled_from("abc"), st.floats() | JSON) | JSON,
        "stuck": st.dictionaries(st.sampled_from("abc"), st.lists(st.integers())) | JSON,
        "findings": JSON,
        "nonfinite": JSON,
    }
)


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lines=st.lists(LINES, max_size=12), rows=st.lists(ROWS, max_size=8))
def test_any_record_gives_a_report(tmp_path: Path, lines: list[object], rows: list[object]) -> None:
    """Fields of every type and size, in any order: a page comes out, never a traceback."""
    (tmp_path / "diary.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load(tmp_path)
    checked(html(run, gpu_hour_cost=1.0))
    checked(summary(run, gpu_hour_cost=1.0))
    assert markdown(run)
    assert summary_markdown(run)
    json.dumps(to_dict(run, gpu_hour_cost=1.0), allow_nan=False)


@pytest.mark.parametrize("layers", [3, 14, 15, 300])
def test_few_and_many_layers_fit_one_page(tmp_path: Path, layers: int) -> None:
    """Rows for few layers, a heat map for many; its size stays that of a picture."""
    writer = RecordWriter(tmp_path)
    names = [f"blocks.{at}.mlp" for at in range(layers)]
    writer.manifest(*names)
    for check in range(150):
        grad = {name: 0.1 * (at + 1) * (1 + check % 7) for at, name in enumerate(names)}
        writer.row(check * 5, 1.0, grad, {name: [check % 3, 0, 0, 0] for name in names})
    content = html(load(writer.end()))
    checked(content)
    assert ("as a heat map" in content) == (layers > 14)
    assert len(content) < 1_500_000


def test_a_summary_answers_who_is_no_engineer(tmp_path: Path) -> None:
    """What was trained, for how long, how it went, what was done, and whether to believe it."""
    run = load(lesioned(tmp_path, mend=True))
    words = checked(summary(run, gpu_hour_cost=2.0)).words
    for part in (
        "Sequential",
        "96 steps",
        "16 channels",
        "neither sealed nor signed",
        "This is an estimate",
        "What this does not tell",
    ):
        assert part in words


def test_markdown_tables_keep_their_columns(tmp_path: Path) -> None:
    """A bar in a name does not make a further column."""
    told = markdown(load(hostile_record(tmp_path, "a|b|c")))
    table = [line for line in told.splitlines() if line.startswith("|")]
    header = next(line for line in table if "median norm" in line)
    row = next(line for line in table if line.startswith(r"| a\|b\|c"))
    assert len(re.findall(r"(?<!\\)\|", row)) == header.count("|")
