"""The documentation says what is there: names, commands, keys, files; and its programs run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import jsonschema
import pytest

import cirron_otel as ci
from cirron_otel import batch, semconv
from cirron_otel.cli.app import cli
from cirron_otel.setting_rules import RULES
from helpers import RunProgram, tree_text

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "cirron_otel"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXTS.values())

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def _text(name: str) -> str:
    return TEXTS[ROOT / name]


def _blocks(text: str, info: str) -> list[str]:
    return [found["body"] for found in _FENCE.finditer(text) if found["info"].strip() == info]


def _sources() -> Iterator[ast.Module]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _texts_in(node: ast.AST) -> set[str]:
    return {
        found.value
        for found in ast.walk(node)
        if isinstance(found, ast.Constant) and isinstance(found.value, str)
    }


def _loss_reasons() -> set[str]:
    """The reasons that the source hands to ``guard.lost``, also by way of an exception's text."""
    reasons: set[str] = set()
    for tree in _sources():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name == "lost" or (
                name == "UnsupportedValueError" and isinstance(call.args[0], ast.Constant)
            ):
                reasons |= _texts_in(call.args[0])
    return reasons


def _written_names() -> set[str]:
    """The constants of semconv that some other module uses."""
    return {
        node.attr
        for tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "semconv"
    }


def _commands(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in _commands(command))
        else:
            yield name


def test_every_public_name_is_explained_to_who_comes_from_cirron_sdk() -> None:
    """The table of names has every name of ``__all__``."""
    page = _text("docs/coming-from-cirron-sdk.md")
    assert [name for name in ci.__all__ if f"`{name}`" not in page] == []


def test_every_command_is_named() -> None:
    """The README names every command that there is."""
    commands = list(_commands(cli))
    assert "traces view" in commands
    assert [name for name in commands if f"cirron-otel {name}" not in _text("README.md")] == []


def test_every_setting_has_its_line() -> None:
    """The page about settings has every setting."""
    page = _text("docs/settings.md")
    assert [name for name in RULES if f"`{name}`" not in page] == []


def test_every_health_key_has_its_line() -> None:
    """The page about health has the keys of a recording and of none."""
    keys = set(ci.health())
    ci.profile(frameworks=[])
    keys |= set(ci.health())
    page = _text("docs/health.md")
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_every_loss_has_its_line() -> None:
    """The page about health has every reason that the source counts a loss under."""
    reasons = _loss_reasons()
    assert {"depth_limit", "graph_capture"} <= reasons
    page = _text("docs/health.md")
    # A reason put together from two parts has its second part on the page, behind some first one.
    ends = {reason for reason in reasons if reason.startswith("_")}
    assert sorted(end for end in ends - {"_"} if f"{end}`" not in page) == []
    assert sorted(reason for reason in reasons - ends if f"`{reason}`" not in page) == []


def test_every_written_name_is_documented() -> None:
    """Each attribute, event, mark and scope name that is written stands in some page."""
    constants = _written_names() & set(vars(semconv))
    assert "SESSION_ID" in constants
    values = {getattr(semconv, constant) for constant in constants - {"FOR_METRICS"}}
    absent = sorted(value for value in values if f"`{value.rstrip('.')}" not in EVERYTHING)
    assert absent == []


def test_every_field_of_the_format_is_documented() -> None:
    """The page about the spool has every field of every row type."""
    page = _text("docs/formats/spool-v1.md")
    kinds = (
        batch.Batch, batch.SpanRecord, batch.SpanOtel, batch.MarkRecord, batch.SnapshotRecord,
    )  # fmt: skip
    fields = {
        name for kind in kinds for name in kind.__struct_encode_fields__ if name.isidentifier()
    }
    assert "value_nonfinite" in fields
    assert sorted(name for name in fields if f"`{name}`" not in page) == []


def test_every_module_has_a_room() -> None:
    """The architecture has every module and package of the library, and none that is not there."""
    page = _text("docs/architecture.md")
    storeys = _blocks(page, "")[0]
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(name for name in there if name not in storeys) == []
    assert sorted(set(re.findall(r"\w+\.py|\w+/", storeys)) - there) == []
    rooms = page[page.index("## Rooms") : page.index("Planned, not here")]
    assert sorted(name for name in there - {"__init__.py"} if f"`{name}`" not in rooms) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of this repository leads to one."""
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", TEXTS[page])
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_decision_is_linked() -> None:
    """Each page about a decision is reached from another page."""
    decisions = [page for page in PAGES if page.parent.name == "decisions"]
    assert decisions
    assert [page.name for page in decisions if f"decisions/{page.name})" not in EVERYTHING] == []


def test_make_targets_exist() -> None:
    """Each ``make`` command in the documentation is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        target
        for text in TEXTS.values()
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if _blocks(TEXTS[page], "python run")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_programs_run(page: Path, run_program: RunProgram) -> None:
    """The programs of a page that are marked ``python run`` run, in order, in one directory.

    Where trees follow, they are what the programs leave.
    """
    runs = [run_program(program) for program in _blocks(TEXTS[page], "python run")]
    assert [run.stderr for run in runs] == [""] * len(runs)
    trees = _blocks(TEXTS[page], "tree")
    assert [tree_text(run, marks=True) + "\n" for run in runs[: len(trees)]] == trees


def test_the_reader_of_the_format_reads_every_row(run_program: RunProgram) -> None:
    """What the page's reader prints of the page's run names every span and mark of it."""
    program, reader = _blocks(_text("docs/formats/spool-v1.md"), "python run")
    run = run_program(program)
    printed = run_program(reader).stdout.splitlines()
    assert [line.split()[0] for line in printed] == [
        *(span.name for span in run.spans),
        *(mark.name for mark in run.marks),
    ]
    assert "loss nan on epoch" in printed


def test_the_example_file_is_a_batch() -> None:
    """The example of the format decodes, comes out again as it is, and obeys the schema."""
    page = _text("docs/formats/spool-v1.md")
    (example,) = (json.loads(text) for text in _blocks(page, "json"))
    decoded = batch.decode(json.dumps(example).encode())
    assert json.loads(batch.encode(decoded)) == example
    assert f"{example['created_ns']:020d}-{example['batch_id']}.json" in page
    schema = json.loads((ROOT / "docs/formats/spool-v1.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(example, schema)


def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """Each ``cirron-otel`` line of the README succeeds where something was recorded."""
    ci.profile(frameworks=[])
    with ci.scope("work"):
        ci.mark("loss", 0.5)
    ci.shutdown()
    lines = [
        line
        for text in _blocks(_text("README.md"), "sh")
        for line in text.splitlines()
        if line.startswith("cirron-otel ")
    ]
    local = [name for name in _commands(cli) if name.startswith(("spool ", "traces "))]
    assert len(lines) >= len(local) - 1
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "cirron_otel.cli.main", *words],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), line


def test_every_test_that_is_named_is_there() -> None:
    """Each test that the scorecard names is defined in the tests."""
    named = set(re.findall(r"`(test_\w+)`", _text("docs/scorecard.md")))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert sorted(named - defined) == []
