"""Threads that work off one stream of jobs: each job once, the first error, and an end."""

from __future__ import annotations

import faulthandler
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streammerge import parallel
from streammerge.parallel import Stopped, Team, run, start_threads


class Trouble(Exception):
    """What jobs raise here."""


@pytest.fixture(autouse=True)
def _all_threads_end() -> Iterator[None]:
    """No test may hang, and none may leave a thread behind."""
    before = set(threading.enumerate())
    stack_size = threading.stack_size()
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert set(threading.enumerate()) <= before
    assert threading.stack_size() == stack_size


def worker(do: Callable[[int], object]) -> Callable[[Team], Callable[[int], None]]:
    """A maker of workers that all do the same."""

    def make_worker(team: Team) -> Callable[[int], None]:
        def work(job: int) -> None:
            do(job)

        return work

    return make_worker


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_each_job_is_done_once(workers: int, count: int) -> None:
    done: list[int] = []
    assert run(iter(range(1, count + 1)), worker(done.append), workers) == 0
    assert sorted(done) == list(range(1, count + 1))


def test_jobs_that_are_false_are_jobs() -> None:
    done: list[object] = []
    run(iter([0, "", (), 0.0, False]), worker(done.append), 2)  # type: ignore[type-var]
    assert len(done) == 5


def test_one_worker_keeps_the_order() -> None:
    done: list[int] = []
    run(iter(range(100)), worker(done.append), 1)
    assert done == list(range(100))


def test_jobs_are_taken_in_order_by_one_thread_at_a_time() -> None:
    inside = threading.Lock()
    taken: list[int] = []
    started: list[int] = []
    lock = threading.Lock()

    def jobs() -> Iterator[int]:
        for i in range(300):
            assert inside.acquire(blocking=False)
            taken.append(i)
            time.sleep(0)
            inside.release()
            yield i

    def do(job: int) -> None:
        with lock:
            started.append(job)

    run(jobs(), worker(do), 4)
    assert taken == list(range(300))
    assert sorted(started) == taken


def test_jobs_are_taken_as_they_are_needed() -> None:
    """A stream of a million jobs must not be kept."""
    ahead = 0
    finished = 0

    def jobs() -> Iterator[int]:
        nonlocal ahead
        for i in range(500):
            ahead = max(ahead, i - finished)
            yield i

    def do(job: int) -> None:
        nonlocal finished
        with lock:
            finished += 1

    lock = threading.Lock()
    run(jobs(), worker(do), 3)
    assert ahead <= 3


def test_each_thread_has_a_worker_of_its_own() -> None:
    made: list[int] = []
    users: dict[int, set[int]] = {}
    lock = threading.Lock()
    everyone = threading.Barrier(3)

    def make_worker(team: Team) -> Callable[[int], None]:
        with lock:
            number = len(made)
            made.append(threading.get_ident())

        def work(job: int) -> None:
            with lock:
                users.setdefault(number, set()).add(threading.get_ident())
            if job < 3:
                everyone.wait(timeout=30)  # so that all of them get one

        return work

    run(iter(range(50)), make_worker, 3)
    assert len(made) == len(set(made)) == 3
    assert {number: {made[number]} for number in range(3)} == users


def test_bytes_are_counted() -> None:
    def make_worker(team: Team) -> Callable[[int], None]:
        return team.advance

    assert run(iter(range(1000)), make_worker, 4) == sum(range(1000))


# --- progress ---


def test_progress_comes_in_the_calling_thread_and_ends_with_all() -> None:
    seen: list[int] = []
    threads: set[int] = set()

    def on_progress(done: int) -> None:
        seen.append(done)
        threads.add(threading.get_ident())

    def make_worker(team: Team) -> Callable[[int], None]:
        return team.advance

    total = run(iter([5] * 200), make_worker, 3, on_progress)
    assert total == 1000
    assert seen[-1] == 1000
    assert seen == sorted(seen)
    assert threads == {threading.get_ident()}


def test_progress_comes_while_a_job_takes_long() -> None:
    release = threading.Event()
    calls = 0

    def on_progress(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            release.set()

    def do(job: int) -> None:
        assert release.wait(timeout=30)

    run(iter([1]), worker(do), 1, on_progress)
    assert calls >= 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Trouble])
def test_an_interruption_ends_all_threads(error: type[BaseException]) -> None:
    """Ctrl-C arrives in the calling thread, between or in its calls of `on_progress`."""
    finished = threading.Event()
    started = 0

    def on_progress(done: int) -> None:
        if done > 10:
            raise error

    def make_worker(team: Team) -> Callable[[int], None]:
        def work(job: int) -> None:
            nonlocal started
            started = job
            team.advance(1)
            time.sleep(0.0005)

        return work

    def jobs() -> Iterator[int]:
        yield from itertools.count(1)
        finished.set()

    with pytest.raises(error):
        run(jobs(), make_worker, 3, on_progress)
    assert not finished.is_set()
    assert started > 10


def test_an_interruption_waits_for_jobs_that_are_being_done() -> None:
    """When `run` is left, nothing is written any more."""
    begun, ended = threading.Event(), threading.Event()

    def on_progress(done: int) -> None:
        assert begun.wait(timeout=30)
        raise KeyboardInterrupt

    def do(job: int) -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(iter([1, 2, 3]), worker(do), 1, on_progress)
    assert ended.is_set()


# --- errors ---


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt, MemoryError, StopIteration])
def test_the_error_of_a_job_is_raised(workers: int, error: type[BaseException]) -> None:
    wrong = error("job 20")
    done: list[int] = []

    def do(job: int) -> None:
        if job == 20:
            raise wrong
        done.append(job)

    with pytest.raises(error) as caught:
        run(iter(range(100_000)), worker(do), workers)
    assert caught.value is wrong
    assert set(range(20)) <= set(done)
    assert len(done) < 100_000


def test_the_first_of_several_errors_is_raised() -> None:
    first = threading.Event()

    def do(job: int) -> None:
        if job == 0:
            first.set()
            raise Trouble("first")
        assert first.wait(timeout=30)
        time.sleep(0.2)
        raise Trouble("later")

    with pytest.raises(Trouble, match="first"):
        run(iter(range(4)), worker(do), 4)


def test_the_error_of_the_stream_of_jobs_is_raised() -> None:
    done: list[int] = []

    def jobs() -> Iterator[int]:
        yield from range(5)
        raise Trouble("no more")

    with pytest.raises(Trouble, match="no more"):
        run(jobs(), worker(done.append), 3)
    assert sorted(done) == list(range(5))


def test_a_stream_that_failed_is_not_asked_again() -> None:
    asked = 0

    class Jobs:
        def __iter__(self) -> Jobs:
            return self

        def __next__(self) -> int:
            nonlocal asked
            asked += 1
            raise Trouble

    with pytest.raises(Trouble):
        run(Jobs(), worker(lambda job: None), 1)
    assert asked == 1


@pytest.mark.parametrize("workers", [1, 4])
def test_the_error_of_making_a_worker_is_raised(workers: int) -> None:
    def make_worker(team: Team) -> Callable[[int], None]:
        raise Trouble("no memory")

    with pytest.raises(Trouble, match="no memory"):
        run(iter(range(10)), make_worker, workers)


def test_others_stop_soon_after_an_error() -> None:
    """A long job ends at its next `advance`."""
    both = threading.Barrier(2)
    stopped = threading.Event()

    def make_worker(team: Team) -> Callable[[int], None]:
        def work(job: int) -> None:
            both.wait(timeout=30)
            if job == 0:
                raise Trouble
            try:
                for _ in range(30_000):
                    team.advance(1)
                    time.sleep(0.001)
            except Stopped:
                stopped.set()
                raise

        return work

    with pytest.raises(Trouble):
        run(iter([0, 1]), make_worker, 2)
    assert stopped.is_set()


def test_an_error_is_raised_with_progress_too() -> None:
    def do(job: int) -> None:
        raise Trouble

    with pytest.raises(Trouble):
        run(iter([1]), worker(do), 2, lambda done: None)


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """The system may refuse further threads; those that run must end all the same."""
    real = threading.Thread.start
    running = 0

    def start(self: threading.Thread) -> None:
        nonlocal running
        if running == started:
            raise RuntimeError("can't start new thread")
        running += 1
        real(self)

    def jobs() -> Iterator[int]:
        for i in range(2000):
            time.sleep(0.001)
            yield i

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Exception, match="thread"):
            run(jobs(), worker(lambda job: None), 4)
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join()
    assert not left, "threads went on after the error"


# --- the team ---


def test_a_stopped_team_says_so() -> None:
    team = Team()
    team.check()
    team.advance(3)
    team.stop()
    with pytest.raises(Stopped):
        team.check()
    with pytest.raises(Stopped):
        team.advance(4)
    assert team.done == 7
    team.raise_error()  # stopped without an error


def test_a_team_keeps_the_first_error() -> None:
    team = Team()
    for text in ("first", "second"):
        team.stop(Trouble(text))
    team.stop()
    with pytest.raises(Trouble, match="first"):
        team.raise_error()


def test_counting_is_safe_between_threads() -> None:
    team = Team()
    threads = [
        threading.Thread(target=lambda: [team.advance(1) for _ in range(3000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert team.done == 12_000


# --- stacks ---


def test_threads_have_stacks_of_the_given_size() -> None:
    sizes: list[int] = []

    def note() -> None:
        sizes.append(1)

    before = threading.stack_size()
    threads = start_threads([note, note], 1 << 20)
    for thread in threads:
        thread.join()
    assert sizes == [1, 1]
    assert threading.stack_size() == before
    assert all(thread.daemon for thread in threads)


@pytest.mark.parametrize("size", [parallel.STACK_SIZE, parallel.TORCH_STACK_SIZE])
def test_the_stack_takes_a_usual_call_depth(size: int) -> None:
    """Deep enough for what jobs do, in a Python without its own limit on C stacks."""
    depths: list[int] = []

    def descend(depth: int) -> int:
        return depth if depth == 100 else descend(depth + 1)

    (thread,) = start_threads([lambda: depths.append(descend(0))], size)
    thread.join()
    assert depths == [100]


def test_cores_are_those_that_this_process_may_use() -> None:
    program = (
        "import os; from streammerge.cores import count_cores;"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(count_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
