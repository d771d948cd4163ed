"""The forwarder: everything arrives, oldest first, whatever destinations answer."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cirron_otel._guard import Guard
from cirron_otel.batch import decode
from cirron_otel.destinations.base import Answer, Parcel, Rejected, RetryAfter, TooLarge
from cirron_otel.destinations.rejected import list_rejected
from cirron_otel.forwarder import Forwarder, Left, describe_left
from delivery.receivers import Receiver, record, until

Start = Callable[..., Forwarder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a forwarder from ``tmp_path`` to the receivers given; stopped at the end."""
    running: list[tuple[Forwarder, tuple[Receiver, ...]]] = []

    def begin(*receivers: Receiver, roots: tuple[Path, ...] = (), **options: object) -> Forwarder:
        forwarder = Forwarder(roots or (tmp_path,), receivers, poll_s=0.02, **options)  # type: ignore[arg-type]
        forwarder.start()
        running.append((forwarder, receivers))
        return forwarder

    yield begin
    for forwarder, receivers in running:
        for receiver in receivers:
            receiver.hold.set()
        forwarder.stop(5)
        until(lambda one=forwarder: not any(c.alive for c in one._couriers))


def test_everything_arrives_oldest_first(tmp_path: Path, start: Start) -> None:
    """What is in the spool at the start, and what comes later, arrives whole and in order."""
    ids = record(tmp_path, 20)
    receiver = Receiver()
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    ids += record(tmp_path, 5, first=20)
    until(lambda: len(receiver.taken) == 25)
    assert receiver.taken == ids
    files = sorted((tmp_path / "spool").glob("*.json"))
    assert [receiver.data[batch_id] for batch_id in ids] == [f.read_bytes() for f in files]


def test_what_was_delivered_is_not_sent_again(tmp_path: Path, start: Start) -> None:
    """The next forwarder in the same directory sends only what the last one left."""
    first = record(tmp_path, 5)
    one = Receiver()
    start(one).stop(20)
    assert one.taken == first
    later = record(tmp_path, 3, first=5)
    other = Receiver()
    assert start(other).drain(20) == []
    assert other.taken == later


def test_a_batch_that_appears_late_under_an_old_name_arrives(tmp_path: Path, start: Start) -> None:
    """Recovery batches and slow writers bring older names: they are delivered like any other."""
    record(tmp_path, 3, first=10)
    receiver = Receiver()
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    old = record(tmp_path, 2, first=1)
    assert forwarder.drain(20) == []
    assert receiver.taken[3:] == old


def test_each_destination_has_its_own_pace(tmp_path: Path, start: Start) -> None:
    """One that hangs holds up no other, and gets everything when it comes back."""
    ids = record(tmp_path, 10)
    good, bad = Receiver("good"), Receiver("bad")
    bad.hold.clear()
    forwarder = start(good, bad)
    bad.inside.wait()
    until(lambda: forwarder.health()[0]["delivered"] == 10)
    assert good.taken == ids
    assert not bad.taken
    states = {one["name"]: one for one in forwarder.health()}
    assert states["good"]["queue_batches"] == 0
    assert states["bad"]["queue_batches"] == 10
    assert states["bad"]["state"] == "sending"
    assert states["bad"]["queue_age_s"] > 0
    assert states["bad"]["queue_bytes"] > 10 * 100
    bad.hold.set()
    until(lambda: bad.taken == ids)


def test_refusals_are_tried_again_with_growing_pauses(tmp_path: Path, start: Start) -> None:
    """A destination that is down is asked again, less and less often, and nothing is skipped."""
    ids = record(tmp_path, 3)
    receiver = Receiver(answers=[RetryAfter(None, "down", 503)] * 3)
    start(receiver)
    until(lambda: receiver.taken == ids)
    assert receiver.tries[:4] == [ids[0]] * 4
    pauses = [b - a for a, b in zip(receiver.times, receiver.times[1:], strict=False)][:3]
    assert pauses[0] >= 0.25
    assert pauses[1] >= 0.5
    assert pauses[2] >= 1.0


def test_the_receiver_s_wish_to_be_left_alone_counts(tmp_path: Path, start: Start) -> None:
    """Nothing is sent before ``Retry-After`` has passed, even when somebody wakes the forwarder."""
    record(tmp_path, 1)
    receiver = Receiver(answers=[RetryAfter(0.6, "slower", 429)])
    forwarder = start(receiver)
    until(lambda: receiver.tries)
    forwarder.wake()
    until(lambda: receiver.taken)
    assert receiver.times[1] - receiver.times[0] >= 0.6


def test_a_wish_for_longer_than_there_is_ends_the_drain_at_once(
    tmp_path: Path, start: Start
) -> None:
    """At the exit nobody waits for a receiver that has said when it will be back."""
    record(tmp_path, 2)
    receiver = Receiver(answers=[RetryAfter(3600, "maintenance", 503)])
    forwarder = start(receiver)
    until(lambda: receiver.tries)
    before = time.monotonic()
    left = forwarder.stop(30)
    assert time.monotonic() - before < 10
    assert left == [Left("the receiver", 2, "maintenance")]


def test_a_drain_does_not_wait_out_a_pause_of_our_own(tmp_path: Path, start: Start) -> None:
    """A destination that came back is used at once when somebody asks for a drain."""
    ids = record(tmp_path, 2)
    receiver = Receiver(answers=[RetryAfter(None, "down", 503)] * 5)
    forwarder = start(receiver)
    until(lambda: len(receiver.tries) == 3)
    assert forwarder.drain(20) == []
    assert receiver.taken == ids


def test_a_rejected_batch_is_set_aside_and_the_next_one_goes(tmp_path: Path, start: Start) -> None:
    """What will never be taken lies in rejected/ with the answer; its file stays in the spool."""
    ids = record(tmp_path, 3)
    receiver = Receiver(
        judge=lambda p: Rejected(422, "no such field") if p.batch_id == ids[1] else None
    )
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    assert receiver.taken == [ids[0], ids[2]]
    [(path, answer)] = list_rejected(tmp_path / "spool")
    assert (answer.status, answer.answer, answer.batch_id) == (422, "no such field", ids[1])
    assert json.loads(path.read_bytes())["batch_id"] == ids[1]
    assert len(list((tmp_path / "spool").glob("*.json"))) == 3
    [state] = forwarder.health()
    assert (state["delivered"], state["rejected"]) == (2, 1)
    forwarder.stop(5)
    again = Receiver()
    assert start(again).drain(20) == []
    assert again.tries == []


def test_a_batch_that_is_too_large_is_halved_until_it_fits(tmp_path: Path, start: Start) -> None:
    """Every row arrives, and the one that alone is too large is set aside alone."""
    [whole] = record(tmp_path, 1, rows=64)
    marker = b'"index":37,'

    def judge(parcel: Parcel) -> Answer | None:
        too_many = len(parcel.batch.spans) > 10
        return TooLarge(None, 413, "too large") if too_many or marker in parcel.data else None

    receiver = Receiver(judge=judge)
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    rows = [row.index for data in receiver.data.values() for row in decode(data).spans]
    assert sorted(rows) == [k for k in range(64) if k != 37]
    assert len(receiver.taken) == len(set(receiver.taken))
    [(path, answer)] = list_rejected(tmp_path / "spool")
    assert answer.whole_batch_id == whole
    assert [row.index for row in decode(path.read_bytes()).spans] == [37]
    assert forwarder.health()[0]["rejected"] == 1


def test_parts_that_are_sent_again_bear_the_same_ids(tmp_path: Path, start: Start) -> None:
    """After a crash in the middle of a halved batch the same parts come again."""
    record(tmp_path, 1, rows=8)

    def judge(parcel: Parcel) -> Answer | None:
        return TooLarge() if len(parcel.batch.spans) > 4 else None

    first = Receiver(judge=judge)
    start(first).stop(20)
    (tmp_path / "cursors" / "receiver.log").unlink()
    second = Receiver(judge=judge)
    start(second).stop(20)
    assert first.taken == second.taken
    assert len(first.taken) == 2


def test_a_batch_that_only_fails_lets_the_others_go_first(tmp_path: Path, start: Start) -> None:
    """A receiver that answers 500 to one batch for ever gets all others."""
    ids = record(tmp_path, 4)
    receiver = Receiver(
        judge=lambda p: RetryAfter(0.01, "it crashed", 500) if p.batch_id == ids[0] else None
    )
    forwarder = start(receiver)
    until(lambda: forwarder.health()[0]["delivered"] == 3)
    assert receiver.taken == ids[1:]
    assert forwarder.health()[0]["queue_batches"] == 1
    receiver.judge = None
    assert forwarder.drain(20) == []
    assert receiver.taken == [*ids[1:], ids[0]]


def test_a_destination_s_bug_loses_nothing(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception out of ``send`` is counted and told, and the batch is sent again."""
    ids = record(tmp_path, 2)
    bugs = [KeyError("bug"), KeyError("bug")]

    def judge(_: Parcel) -> Answer | None:
        if bugs:
            raise bugs.pop()
        return None

    guard = Guard()
    receiver = Receiver(judge=judge)
    with caplog.at_level(logging.WARNING):
        assert start(receiver, guard=guard).drain(20) == []
    assert receiver.taken == ids
    assert guard.swallowed["destination receiver"] == 2
    assert sum("bug" in message for message in caplog.messages) == 1


def test_a_file_that_is_no_batch_is_set_aside(tmp_path: Path, start: Start) -> None:
    """A broken file of a destination that has to decode it holds up nobody."""
    [good] = record(tmp_path, 1, first=5)
    (tmp_path / "spool" / f"{7:020d}-{7:032x}.json").write_text("{broken")

    def judge(parcel: Parcel) -> Answer | None:
        assert parcel.batch.batch_id == parcel.batch_id
        return None

    receiver = Receiver(judge=judge)
    assert start(receiver).drain(20) == []
    assert receiver.taken == [good]
    [(path, answer)] = list_rejected(tmp_path / "spool")
    assert path.read_text() == "{broken"
    assert "not a batch" in answer.answer


def test_a_file_that_cannot_be_read_is_never_taken_for_delivered(
    tmp_path: Path, start: Start
) -> None:
    """What the disk does not give stays in the queue, told; the others go past it."""
    obstacle = tmp_path / "spool" / f"{1:020d}-{1:032x}.json"
    obstacle.mkdir(parents=True)
    ids = record(tmp_path, 2)
    receiver = Receiver()
    forwarder = start(receiver)
    until(lambda: receiver.taken == ids, timeout=40)
    assert forwarder.health()[0]["failures"] >= 4
    until(lambda: forwarder.health()[0]["queue_batches"] == 1)
    assert [one.batches for one in forwarder.stop(0.1)] == [1]
    assert obstacle.stem not in (tmp_path / "cursors" / "receiver.log").read_text()


def test_flushing_in_a_loop_does_not_hammer_a_destination(tmp_path: Path, start: Start) -> None:
    """However often the forwarder is woken, a destination that is down has its pauses."""
    record(tmp_path, 1)
    receiver = Receiver(answers=[RetryAfter(None, "down", 503)] * 50)
    forwarder = start(receiver)
    until(lambda: receiver.tries)
    for _ in range(50):
        forwarder.wake()
        time.sleep(0.01)
    assert len(receiver.tries) < 10
    receiver.answers.clear()
    assert forwarder.drain(20) == []


def test_what_was_evicted_is_counted_and_passed_over(tmp_path: Path, start: Start) -> None:
    """A file that vanishes while it waits is no error."""
    ids = record(tmp_path, 3)
    receiver = Receiver()
    receiver.hold.clear()
    forwarder = start(receiver)
    receiver.inside.wait()
    sorted((tmp_path / "spool").glob("*.json"))[1].unlink()
    receiver.hold.set()
    assert forwarder.drain(20) == []
    assert receiver.taken == [ids[0], ids[2]]
    assert forwarder.health()[0]["gone_undelivered"] == 1
    assert forwarder.health()[0]["queue_batches"] == 0


def test_two_forwarders_share_the_work_of_one(tmp_path: Path, start: Start) -> None:
    """Two ranks in one directory: one delivers, the other takes over when it ends."""
    ids = record(tmp_path, 5)
    one, other = Receiver(), Receiver()
    first = start(one)
    assert first.drain(20) == []
    second = start(other)
    until(lambda: second.health()[0]["state"] == "elsewhere")
    ids += record(tmp_path, 5, first=5)
    until(lambda: one.taken == ids)
    assert second.drain(20) == []
    assert other.tries == []
    first.stop(5)
    later = record(tmp_path, 2, first=20)
    until(lambda: other.taken == later)


def test_one_that_waits_for_another_does_not_wait_for_ever(tmp_path: Path, start: Start) -> None:
    """At the exit of a rank, another rank's hanging destination is that rank's business."""
    record(tmp_path, 3)
    hanging, idle = Receiver(), Receiver()
    hanging.hold.clear()
    start(hanging)
    hanging.inside.wait()
    second = start(idle)
    until(lambda: second.health()[0]["state"] == "elsewhere")
    before = time.monotonic()
    assert second.stop(30) == []
    assert time.monotonic() - before < 10
    assert idle.tries == []


def test_many_directories_are_one_queue(tmp_path: Path, start: Start) -> None:
    """Batches of all directories go oldest first; one that is made later is found."""
    roots = tuple(tmp_path / name for name in "abc")
    ids = [*record(roots[0], 2), *record(roots[1], 2, first=2)]
    receiver = Receiver()
    forwarder = start(receiver, roots=roots)
    assert forwarder.drain(20) == []
    assert receiver.taken == ids
    assert not roots[2].exists()
    ids += record(roots[2], 1, first=9)
    until(lambda: receiver.taken == ids)


def test_stopping_takes_no_longer_than_it_may(tmp_path: Path, start: Start) -> None:
    """With a destination that hangs the rest stays, is said, and the next run has it."""
    ids = record(tmp_path, 4)
    receiver = Receiver()
    receiver.hold.clear()
    forwarder = start(receiver)
    receiver.inside.wait()
    before = time.monotonic()
    left = forwarder.stop(0.3)
    assert time.monotonic() - before < 5
    assert left == [Left("the receiver", 4, "no answer yet")]
    line = describe_left(left, tmp_path)
    assert line is not None
    assert "4 batches to the receiver" in line
    assert f"cirron-otel spool flush --dir {tmp_path}" in line
    receiver.hold.set()  # the answer that came too late counts, and the place becomes free
    until(lambda: receiver.closed)
    again = Receiver()
    assert start(again).drain(20) == []
    assert receiver.taken + again.taken == ids


def test_starting_and_stopping_leaks_no_thread(tmp_path: Path) -> None:
    """A hundred forwarders leave no thread and no open place behind."""
    record(tmp_path, 1)
    threads = threading.active_count()
    for _ in range(100):
        forwarder = Forwarder([tmp_path], [Receiver()], poll_s=0.02)
        forwarder.start()
        assert forwarder.stop(20) == []
    assert threading.active_count() == threads


def test_the_user_is_told_once_before_undelivered_batches_leave(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """At 80 % of the cap, undelivered, one warning says so."""
    record(tmp_path, 10, rows=20)
    size = sum(f.stat().st_size for f in (tmp_path / "spool").glob("*.json"))
    receiver = Receiver(answers=[RetryAfter(0.05, "down", 503)] * 20)
    with caplog.at_level(logging.WARNING):
        forwarder = start(receiver, max_bytes=int(size / 0.9))
        until(lambda: len(receiver.tries) > 5)
    assert sum("spool_max_bytes" in message for message in caplog.messages) == 1
    assert forwarder.drain(20) == []


def test_trouble_is_told_once_a_minute(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A destination that keeps failing writes one line, with its name and its answer."""
    record(tmp_path, 2)
    receiver = Receiver(answers=[RetryAfter(0.01, "HTTP 503: closed", 503)] * 20)
    with caplog.at_level(logging.WARNING):
        assert start(receiver).drain(20) == []
    told = [message for message in caplog.messages if "closed" in message]
    assert len(told) == 1
    assert "the receiver" in told[0]
