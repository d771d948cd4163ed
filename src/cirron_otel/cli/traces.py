"""``cirron-otel traces``: the sessions in a spool, and their trees."""

from __future__ import annotations

import click

from cirron_otel.cli import ranks as side_by_side
from cirron_otel.cli.json_tree import session_summary, write_sessions
from cirron_otel.cli.screen import Screen, Warnings, json_option, no_color_option, print_json
from cirron_otel.cli.snapshots import snapshot, snapshots
from cirron_otel.cli.where import find_spool, spool_option
from cirron_otel.errors import CirronError
from cirron_otel.reading.index import SessionInfo
from cirron_otel.reading.nodes import prune
from cirron_otel.reading.sessions import ORPHANS, Index, Node, Session, choose, trees
from cirron_otel.reading.text import Options, Segment, lines
from cirron_otel.reading.values import clean, duration, local_time, parse_duration, plural, size

#: A tree for the eye: of more spans than this the oldest are only counted.
_MAX_SPANS = 200_000
_SHORT_ID = 12


class _Duration(click.ParamType[int]):
    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return parse_duration(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


@click.group()
def traces() -> None:
    """Look at recorded sessions, also while they are still running."""


traces.add_command(snapshots)
traces.add_command(snapshot)


@traces.command(name="list")
@spool_option
@json_option
@no_color_option
def list_(directory: str | None, *, as_json: bool, no_color: bool) -> None:
    """List the sessions, newest first."""
    found = find_spool(directory, "--spool")
    warnings = Warnings()
    index = Index(found, on_error=warnings)
    warnings.close()
    sessions = list(index.sessions)
    if index.orphans.spans or index.orphans.marks:
        sessions.append(index.orphans)
    if as_json:
        summaries = [session_summary(info) for info in sessions]
        print_json({"dir": str(found.directory), "sessions": summaries})
        return
    screen = Screen(color=not no_color)
    if not sessions:
        screen.text(f"no sessions in {found.directory} yet")
        return
    short = _short_ids(sessions)
    head = ("SESSION", "STARTED", "DURATION", "STATE", "RUN", "RANK", "SPANS", "MARKS",
            "SNAPSHOTS", "SIZE")  # fmt: skip
    rows = [_row(info, short[info.id], index.now_ns) for info in sessions]
    screen.table(head, rows, "llrllrrrrr")


def _row(info: SessionInfo, short: str, now_ns: int) -> list[Segment]:
    known = info.id != ORPHANS
    ended_ns = info.ended_ns if info.ended_ns is not None else now_ns
    run = clean(info.run_id or info.service or "")
    if info.attempt is not None and info.attempt > 1:
        run += f" (attempt {info.attempt})"
    return [
        (short, "name"),
        (local_time(info.started_ns) if known else "", "plain"),
        (duration(ended_ns - info.started_ns) if known else "", "plain"),
        _state(info),
        (run, "plain"),
        (",".join(map(str, sorted(info.ranks))) if known else "", "plain"),
        (f"{info.spans:,}", "plain"),
        (f"{info.marks:,}", "plain"),
        (f"{info.snapshots:,}", "plain"),
        (size(info.bytes), "plain"),
    ]


def _state(info: SessionInfo) -> Segment:
    if info.id == ORPHANS:
        return "no session", "dim"
    if info.live:
        return "live", "open"
    if info.recovered:
        return "recovered", "lost"
    if info.rootless:
        return "no root", "lost"
    if info.outcome in {"interrupted", "preempted"}:
        return info.outcome, "lost"
    return ("failed", "error") if info.failed else ("done", "plain")


def _short_ids(sessions: list[SessionInfo]) -> dict[str, str]:
    """Beginnings that name one session each."""
    count = _SHORT_ID
    ids = [info.id for info in sessions]
    while len({session_id[:count] for session_id in ids}) < len(ids):
        count += 4
    return {session_id: session_id[:count] for session_id in ids}


@traces.command(short_help="Show a session as a tree, or the ranks of its run.")
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option("--session", "session_option", metavar="ID", help="A session's id, or its beginning.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="The newest N sessions [1].")
@click.option("--name", metavar="TEXT", help="Only spans with this in their name, and all below.")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Levels below the session.")
@click.option("--min-wall", type=_Duration(), metavar="TIME", help="Hide shorter spans: 5ms, 1.5s.")
@click.option("--all", "everything", is_flag=True, help="Every span, mark and attribute.")
@click.option("--overhead", is_flag=True, help="Show what the instrumentation itself cost.")
@click.option("--ranks", is_flag=True, help="The ranks of its run side by side, and who is slow.")
@spool_option
@json_option
@no_color_option
def view(  # noqa: PLR0913 - the options of a command
    session_id: str | None,
    directory: str | None,
    *,
    session_option: str | None,
    last: int | None,
    name: str | None,
    depth: int | None,
    min_wall: int | None,
    everything: bool,
    overhead: bool,
    ranks: bool,
    as_json: bool,
    no_color: bool,
) -> None:
    """Show a session as a tree: the newest, or the one that SESSION begins."""
    wanted = _one_id(session_id, session_option, last)
    found = find_spool(directory, "--spool")
    warnings = Warnings()
    index = Index(found, on_error=warnings)
    chosen = choose(index, session=wanted, last=None if wanted else last or 1)
    if ranks and chosen:
        warnings.close()
        side_by_side.show(Screen(color=not no_color), index, chosen[0], as_json=as_json)
        return
    whole = everything or as_json or name is not None or min_wall is not None
    sessions = trees(index, chosen, max_spans=None if whole else _MAX_SPANS)
    warnings.close()
    if not sessions:
        raise CirronError(f"no sessions in {found.directory} yet")
    shown = [(session, _filtered(session, name, min_wall)) for session in sessions]
    if name is not None and not any(roots for _, roots in shown):
        raise CirronError(f"no span has {name!r} in its name")
    if as_json:
        write_sessions(shown, depth=depth, as_list=last is not None and last > 1)
        return
    screen = Screen(color=not no_color)
    options = Options(
        depth=depth,
        everything=everything,
        overhead=overhead,
        now_ns=index.now_ns,
        ascii_only=screen.ascii_only,
        titles={info.id: title for info in chosen if (title := _title(info))},
    )
    for i, (session, roots) in enumerate(shown):
        if i:
            screen.text("")
        for line in lines(roots, options):
            screen.line(line)
        screen.text("")
        _footer(screen, session)
    _point_at_orphans(screen, index, chosen)


@traces.command(short_help="Send a recorded session to an OTLP receiver.")
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option("--otlp", metavar="URL", help="The receiver [$OTEL_EXPORTER_OTLP_ENDPOINT].")
@click.option("--session", "session_option", metavar="ID", help="A session's id, or its beginning.")
@click.option("--run", "run_id", metavar="ID", help="Every session of this run: all its ranks.")
@click.option("--all", "everything", is_flag=True, help="Every session in the spool.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Sent along.")
@click.option(
    "--protocol",
    type=click.Choice(["http/protobuf", "http/json", "grpc"]),
    help="[$OTEL_EXPORTER_OTLP_PROTOCOL, http/protobuf]",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="SECONDS",
    help="Give up after so long without progress [30].",
)
@spool_option
@json_option
def replay(  # noqa: PLR0913 - the options of a command
    session_id: str | None,
    directory: str | None,
    *,
    otlp: str | None,
    session_option: str | None,
    run_id: str | None,
    everything: bool,
    headers: tuple[str, ...],
    protocol: str | None,
    patience: float,
    as_json: bool,
) -> None:
    """Send a recorded session to an OTLP receiver: the newest, or the one that SESSION begins.

    Spans keep their ids: what the receiver has already, it has once. Nothing of the delivery is
    changed.
    """
    # Only here: it loads what talks to the network, which no other command should wait for.
    from cirron_otel.cli import replay as sending  # noqa: PLC0415

    wanted = _one_id(session_id, session_option, None)
    if (wanted is not None) + (run_id is not None) + everything > 1:
        raise click.UsageError("choose by SESSION, by --run, or take --all")
    found = find_spool(directory, "--spool")
    destination = sending.destination_for(otlp, headers, protocol)
    sending.close_what_died(found)
    warnings = Warnings()
    index = Index(found, on_error=warnings)
    warnings.close()
    if run_id is not None:
        chosen = [info for info in index.sessions if info.run_id == run_id]
        if not chosen:
            raise CirronError(f"no session in {found.directory} belongs to a run {run_id!r}")
    else:
        chosen = choose(index, session=wanted, last=None if wanted or everything else 1)
    if not chosen:
        raise CirronError(f"no sessions in {found.directory} yet")
    screen = Screen()
    outcome = sending.replay(
        index, chosen, destination, patience=patience, show=screen.is_terminal and not as_json
    )
    destination.close()
    if as_json:
        print_json({**vars(outcome), "receiver": destination.target.url})
    else:
        what = f"{outcome.sessions:,} {plural('session', outcome.sessions)}"
        screen.text(
            f"sent {outcome.spans:,} {plural('span', outcome.spans)} of {what} to "
            f"{destination.target.url}"
        )
        if outcome.missing_marks:
            screen.text(f"{outcome.missing_marks:,} marks are on no span: their files are gone")
    if outcome.refused or outcome.rejected:
        raise CirronError(
            f"the receiver refused {outcome.refused:,} spans and {outcome.rejected:,} batches: "
            f"{clean(outcome.note)}"
        )


def _one_id(argument: str | None, option: str | None, last: int | None) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise click.UsageError("give the session once: as SESSION or with --session")
    wanted = option if argument is None else argument
    if wanted is not None and last is not None:
        raise click.UsageError("--last chooses sessions itself; leave it out to name one")
    return wanted


def _filtered(session: Session, name: str | None, min_wall: int | None) -> list[Node]:
    roots = [session.root]
    if name is not None:
        roots = prune(roots, lambda node: name in node.span.name, whole=True)
    if min_wall is not None:
        shortest = min_wall
        roots = prune(roots, lambda node: node.duration_ns is None or node.duration_ns >= shortest)
    return roots


def _title(info: SessionInfo) -> str:
    run = info.run_id or info.service
    return "" if run is None else f"run {run}"


def _footer(screen: Screen, session: Session) -> None:
    info = session.info
    parts = [f"session {info.id}"]
    if info.id != ORPHANS:
        parts.append(f"started {local_time(info.started_ns)}")
    for count, what in ((info.spans, "span"), (info.marks, "mark"), (info.snapshots, "snapshot")):
        if count:
            parts.append(f"{count:,} {plural(what, count)}")
    if len(info.ranks) > 1:
        parts.append(f"ranks {','.join(map(str, sorted(info.ranks)))}")
    screen.text(", ".join(parts), "dim")
    if session.omitted:
        screen.text(f"{session.omitted:,} older spans were not read; --all reads them", "lost")
    if info.rootless and info.id != ORPHANS:
        screen.text("the session's own span is not in the spool", "lost")


def _point_at_orphans(screen: Screen, index: Index, chosen: list[SessionInfo]) -> None:
    orphans = index.orphans
    if orphans in chosen or not (orphans.spans or orphans.marks):
        return
    screen.text(
        f"{orphans.spans:,} {plural('span', orphans.spans)} and {orphans.marks:,} "
        f"{plural('mark', orphans.marks)} belong to no session: "
        f"cirron-otel traces view {ORPHANS}",
        "dim",
    )
