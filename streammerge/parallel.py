"""A few threads that share one stream of jobs."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Job = TypeVar("Job")

STACK_SIZE = 256 << 10  # the default of 8 MiB per thread would count as data
TORCH_STACK_SIZE = 4 << 20  # torch's kernels need more
_POLL_SECONDS = 0.1
_starting = threading.Lock()  # the size of stacks is one for all threads that are started


class Stopped(Exception):
    """Raised inside a worker by `Team.check` when the others are to stop."""


class Team:
    """What the threads of one run share.

    Attributes:
        done: bytes finished so far, for progress.
    """

    def __init__(self) -> None:
        self.done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def advance(self, nbytes: int) -> None:
        """Count finished bytes, and stop here if the run was given up."""
        with self._lock:
            self.done += nbytes
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if the run was given up."""
        if self._stop.is_set():
            raise Stopped

    def stop(self, error: BaseException | None = None) -> None:
        """Give the run up; the first error is the one that is raised."""
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
        self._stop.set()

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error


def run(
    jobs: Iterator[Job],
    make_worker: Callable[[Team], Callable[[Job], None]],
    workers: int,
    on_progress: Callable[[int], None] | None = None,
    stack_size: int = STACK_SIZE,
) -> int:
    """Do all `jobs` with threads, each job once.

    Args:
        jobs: taken by one thread at a time, in order.
        make_worker: called once per thread; gives the function that does a job.
        workers: number of threads.
        on_progress: called now and then, in the calling thread, with the bytes done.
        stack_size: bytes of stack per thread.

    Returns:
        Bytes done.

    Raises:
        BaseException: the first error of a job or of the stream of jobs. All threads have ended.
    """
    team = Team()
    lock = threading.Lock()
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def loop() -> None:
        try:
            work = make_worker(team)
            while True:
                team.check()
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                work(job)
        except Stopped:
            pass
        except BaseException as error:
            team.stop(error)
        finally:
            ended.put(None)

    threads: list[threading.Thread] = []
    # Jobs make many small objects. Each time that the collector looks for garbage, it would look
    # through all of a checkpoint and of torch: up to a quarter of the time of a cast.
    gc.freeze()
    try:
        start_threads([loop] * workers, stack_size, threads)
        running = workers
        while running:
            try:
                ended.get(timeout=_POLL_SECONDS)
                running -= 1
            except queue.Empty:
                pass
            if on_progress is not None:
                on_progress(team.done)
    except BaseException:
        team.stop()
        raise
    finally:
        for thread in threads:
            thread.join()
        gc.unfreeze()
    team.raise_error()
    return team.done


def start_threads(
    targets: list[Callable[[], None]],
    stack_size: int = STACK_SIZE,
    started: list[threading.Thread] | None = None,
) -> list[threading.Thread]:
    """Start threads with stacks of a given size in bytes; `started` grows with each."""
    started = [] if started is None else started
    with _starting:
        previous = threading.stack_size(stack_size)
        try:
            for target in targets:
                thread = threading.Thread(target=target, daemon=True)
                thread.start()
                started.append(thread)
        finally:
            threading.stack_size(previous)
    return started
