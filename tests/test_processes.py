"""How processes meet, and how all of them end when one fails; here they are threads."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_store import FakeStore

from streammerge import processes
from streammerge.errors import (
    CorruptFileError,
    ProcessesError,
    ReplicaMismatchError,
    SourceError,
    StreamMergeError,
    UsageError,
)
from streammerge.processes import Processes, SaidElsewhere, Terminated, join


class Line:
    """A connection to a store, which may get lost in either way."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.silent = threading.Event()
        self.cut = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.cut.is_set():
            raise RuntimeError("Connection reset by peer. This may indicate\nmany frames")
        while self.silent.is_set():
            time.sleep(0.01)
        return getattr(self._store, name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorter deadlines, and none that hangs."""
    monkeypatch.setattr(processes, "_JOIN_SECONDS", 1.0)
    monkeypatch.setattr(processes, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(processes, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(processes, "_LEAVING_SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(processes, "_LEAVING_SECONDS", 5.0)
    monkeypatch.setattr(processes, "_POLL_SECONDS", (0.005, 0.02))
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


Work = Callable[[Processes], object]


class Died(BaseException):
    """Ends a thread as SIGKILL ends a process: it says nothing."""


def together(size: int, work: Work, *, hosts: int = 1, absent: tuple[int, ...] = ()) -> list[Any]:
    """What each process returns or raises."""
    store = FakeStore()
    ends: list[Any] = [None] * size
    dead: set[int] = set()
    over = threading.Event()

    def live(rank: int) -> None:
        line = Line(store)
        local_size = size // hosts
        one = Processes(
            rank,
            size,
            local_rank=rank % local_size,
            local_size=local_size,
            connect=lambda: line,
        )
        one.line = line  # type: ignore[attr-defined]
        try:
            with one:
                try:
                    ends[rank] = work(one)
                except Died:
                    line.silent.set()
                    dead.add(rank)
                    over.wait(30)
                    line.cut.set()
                    line.silent.clear()
                    return
        except BaseException as error:
            ends[rank] = error

    threads = {
        rank: threading.Thread(target=live, args=[rank])
        for rank in range(size)
        if rank not in absent
    }
    for thread in threads.values():
        thread.start()
    for rank, thread in threads.items():
        while rank not in dead and thread.is_alive():
            thread.join(0.01)
    over.set()
    for thread in threads.values():
        thread.join()
    return ends


def fails(rank: int, error: BaseException) -> Work:
    """One process fails, while the others wait for all."""

    def work(one: Processes) -> object:
        if one.rank == rank:
            raise error
        return one.exchange(None)

    return work


def lost_line(rank: int) -> Work:
    def work(one: Processes) -> object:
        if one.rank == rank:
            raise Died
        return one.exchange(None)

    return work


# --- meeting --------------------------------------------------------------------------------------


def test_one_process_needs_nobody() -> None:
    with Processes() as alone:
        assert alone.exchange({"a": 1}) == [{"a": 1}]
        alone.tell(done=3)
        alone.tell(other=4)
        alone.check()
        assert alone.told() == [{"done": 3, "other": 4}]
        assert alone.first
        assert alone.default_workers is None
        with alone.interruptible(), alone.ending_first():
            pass


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SourceError("x")])
def test_one_process_fails_as_it_does(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Processes() as alone, alone.ending_first():
        raise error
    assert caught.value is error
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("size", [2, 3, 8])
def test_values_by_rank(size: int) -> None:
    def work(one: Processes) -> object:
        return [one.exchange([one.rank, turn, "ä\n"]) for turn in range(5)]

    expected = [[[rank, turn, "ä\n"] for rank in range(size)] for turn in range(5)]
    assert together(size, work) == [expected] * size


def test_others_are_awaited() -> None:
    meanwhile: list[int] = []

    def work(one: Processes) -> object:
        if one.rank == 1:
            time.sleep(0.3)
        return one.exchange(one.rank, meanwhile=lambda: meanwhile.append(one.rank))

    assert together(3, work) == [[0, 1, 2]] * 3
    assert {0, 2} <= set(meanwhile)


def test_the_first_process_hears_what_others_tell() -> None:
    def work(one: Processes) -> object:
        one.tell(done=10 * one.rank, kept=True)
        one.tell(done=10 * one.rank + 1)
        deadline = time.monotonic() + 10
        expected = [{"done": 10 * rank + 1, "kept": True} for rank in range(3)]
        while one.first and one.told() != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        one.exchange(None)
        return one.told() == expected

    assert together(3, work)[0] is True


def test_threads_of_a_machine_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammerge.processes.count_cores", lambda: 12)
    workers = [Processes(0, 8, local_size=n).default_workers for n in (1, 2, 4, 8, 64)]
    assert workers == [None, 4, 3, 1, 1]


def test_somebody_who_does_not_come() -> None:
    ends = together(4, lambda one: None, absent=(1, 3))
    assert isinstance(ends[0], ProcessesError)
    assert str(ends[0]) == "processes 1, 3 of 4 did not come within 1 s"
    assert ends[0].hint is not None
    assert isinstance(ends[2], SaidElsewhere)


def test_the_first_does_not_come() -> None:
    ends = together(3, lambda one: None, absent=(0,))
    errors = sorted(ends[1:], key=lambda error: isinstance(error, SaidElsewhere))
    assert str(errors[0]) == "process 0 of 3 did not come within 1 s"
    assert isinstance(errors[1], SaidElsewhere)


# --- ending ---------------------------------------------------------------------------------------

CAUSED = SourceError("a.pt: Input/output error")
CAUSED.__cause__ = OSError(5, "Input/output error")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    "error",
    [
        CorruptFileError("a.pt: cut short", hint="copy it again"),
        ReplicaMismatchError("key 'b': rank 1 holds another value"),
        UsageError("--bogus"),
        ProcessesError("process 1 does something else"),
        CAUSED,
        KeyboardInterrupt(),
        Terminated(),
    ],
)
def test_all_end_with_the_error_of_one(rank: int, error: BaseException) -> None:
    first, *others = together(3, fails(rank, error))
    assert type(first) is type(error)
    assert str(first) == str(error)
    if isinstance(error, StreamMergeError):
        assert first.hint == error.hint
    assert isinstance(first.__cause__, OSError) == isinstance(error.__cause__, OSError)
    for other in others:
        assert isinstance(other, SaidElsewhere)
        assert type(other.error) is type(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bug_in_one(rank: int) -> None:
    first, other = together(2, fails(rank, ZeroDivisionError("division by zero")))
    assert isinstance(other, SaidElsewhere)
    if rank == 0:
        assert isinstance(first, ZeroDivisionError)
    else:
        assert isinstance(first, ProcessesError)
        assert str(first) == "process 1: unexpected ZeroDivisionError: division by zero"
        assert first.hint == "run it again with --debug and report what it shows"


def test_the_first_error_counts() -> None:
    """Others that are interrupted because of it say it, not that they were interrupted."""
    failed = threading.Event()

    def work(one: Processes) -> object:
        if one.rank == 1:
            failed.set()
            raise CorruptFileError("a.pt: damaged")
        failed.wait()
        time.sleep(0.1)
        raise Terminated

    first, *others = together(3, work)
    assert isinstance(first, CorruptFileError)
    for other in others:
        assert isinstance(other, SaidElsewhere)
        assert isinstance(other.error, CorruptFileError)


def test_a_failure_stops_work() -> None:
    """Where nothing is exchanged, it is enough to check now and then."""

    def work(one: Processes) -> object:
        if one.rank == 1:
            raise CorruptFileError("a.pt: damaged")
        while True:
            one.check()
            time.sleep(0.01)

    first, _, third = together(3, work)
    assert isinstance(first, CorruptFileError)
    assert isinstance(third, SaidElsewhere)


def test_a_failure_behind_the_last_exchange() -> None:
    """Those who are done already hear of it too."""

    def work(one: Processes) -> object:
        if one.rank == 0:
            time.sleep(0.2)
            raise CorruptFileError("upload failed")
        return "done"

    first, *others = together(3, work)
    assert isinstance(first, CorruptFileError)
    assert all(isinstance(other, SaidElsewhere) for other in others)


def test_the_first_goes_on_when_all_others_have_ended() -> None:
    """It removes what they write to."""
    events: list[str] = []

    def work(one: Processes) -> object:
        try:
            if one.first:
                with one.ending_first():
                    one.exchange(None)
            else:
                if one.rank == 1:
                    raise CorruptFileError("a.pt: damaged")
                one.exchange(None)
        finally:
            if not one.first:
                time.sleep(0.3)
            events.append("first" if one.first else "other")
        return None

    first, *_ = together(3, work)
    assert isinstance(first, CorruptFileError)
    assert events == ["other", "other", "first"]


# --- processes that say nothing any more ----------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_one_dies(size: int) -> None:
    ends = together(size, lost_line(1))
    assert isinstance(ends[0], ProcessesError)
    assert str(ends[0]).startswith(f"process 1 of {size} (")
    assert str(ends[0]).endswith(") is gone without a word")
    assert ends[0].hint is not None
    for other in ends[2:]:
        assert isinstance(other, SaidElsewhere)


def test_the_first_dies() -> None:
    """One of the others says it, the one that noticed."""
    _, *others = together(4, lost_line(0))
    said = [error for error in others if isinstance(error, ProcessesError)]
    assert len(said) == 1
    assert str(said[0]).startswith("process 0 of 4 (")
    assert sum(isinstance(error, SaidElsewhere) for error in others) == 2


def test_torchrun_notices_first() -> None:
    """It terminates the others, who then find out why."""

    def work(one: Processes) -> object:
        if one.rank == 1:
            raise Died
        raise Terminated

    first, _, third = together(3, work)
    assert isinstance(first, ProcessesError)
    assert str(first).startswith("process 1 of 3 (")
    assert isinstance(third, SaidElsewhere)
    assert isinstance(third.error, ProcessesError)


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_the_store_is_gone(how: str) -> None:
    """Nobody can be asked: one process of each machine says it."""

    def work(one: Processes) -> object:
        one.exchange(None)
        lines.append(one.line)  # type: ignore[attr-defined]
        if one.rank == 0:
            while len(lines) < 4:
                time.sleep(0.01)
            for line in lines:
                getattr(line, how).set()
        return one.exchange(None, meanwhile=lambda: time.sleep(0.05))

    lines: list[Line] = []
    ends = together(4, work, hosts=2)
    for end in (ends[0], ends[2]):
        assert isinstance(end, ProcessesError)
        said = "(Connection reset by peer. This may indicate)" if how == "cut" else "not answered"
        assert said in str(end)
        assert "\n" not in str(end)
    for end in (ends[1], ends[3]):
        assert isinstance(end, SaidElsewhere)
    for line in lines:
        line.silent.clear()


@pytest.fixture
def same_signals() -> Iterator[None]:
    """A process that fails with others ignores signals from then on."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_signals")
def test_planning_is_interrupted() -> None:
    """It asks nobody for a long time, and may be in a system call."""
    store = FakeStore()
    events: list[str] = []

    def fail(one: Processes) -> None:
        with one:
            time.sleep(0.2)
            raise CorruptFileError("a.pt: damaged")

    def plan(one: Processes) -> None:
        with one, one.interruptible():
            try:
                time.sleep(30)
                events.append("planned")
            except KeyboardInterrupt:
                events.append("interrupted")
                raise

    def live(rank: int, work: Callable[[Processes], None]) -> None:
        try:
            work(Processes(rank, 2, local_rank=rank, local_size=2, connect=lambda: store))
        except (SaidElsewhere, CorruptFileError) as error:
            events.append(type(error).__name__)

    other = threading.Thread(target=live, args=[1, fail])
    other.start()
    live(0, plan)
    other.join()
    assert events[0] == "interrupted"
    assert sorted(events[1:]) == ["CorruptFileError", "SaidElsewhere"]


# --- what torchrun says ---------------------------------------------------------------------------

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a container where something else sets these."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert join().size == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK='-1' in the environment, expected a number from 0 on"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment, expected a number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment, expected a number from 1 on"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment, expected a number from 0 on"),
    ],
)
def test_an_environment_that_makes_no_sense(
    change: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        join()
    assert str(caught.value) == said
