"""The processes that merge together: those that torchrun started, or the only one.

They meet through the key-value store that torchrun keeps for `torch.distributed`, with small JSON
values. Not through collective calls: these wait where Ctrl-C does not reach them, need a network
interface besides, and do not say which process is missing. A thread of its own talks to the store,
so the main thread can be interrupted whatever the network does.

Where one process fails, all end with its error, and one of them reports it: the first, or, if that
died, the one that noticed. A single process needs no torch, and none of this.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Protocol

from streammerge import errors
from streammerge.cores import count_cores
from streammerge.errors import ProcessesError, StreamMergeError, UnsupportedError, UsageError

_JOIN_SECONDS = 60.0  # until all have started
_BEAT_SECONDS = 1.0  # between two signs of life
_SILENCE_SECONDS = 20.0  # without one, after which a process counts as dead
_LEAVING_SILENCE_SECONDS = 4.0  # the same while all end anyway
_LEAVING_SECONDS = 15.0  # torchrun kills what has not ended after 30
_POLL_SECONDS = (0.02, 0.5)  # between two looks into the store, from the first to later ones
_meetings = itertools.count()  # of this process, should it merge more than once
_HINT = "killed, out of memory, or its machine or network failed?"


class Store(Protocol):
    """What is used of `torch.distributed.Store`. Nothing here waits for a key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


_State = tuple[int, Mapping[str, Any]]  # what a process tells; the highest number is the newest


class Terminated(BaseException):
    """SIGTERM, as an exception, so that everything is cleaned up."""


class SaidElsewhere(BaseException):
    """This process ends, and another one says why.

    Attributes:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Request:
    """Something to do with the store."""

    operation: Callable[[Store], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class Processes:
    """All processes of a merge, seen from one of them. A context manager around what they share.

    Args:
        rank: number of this process.
        size: number of all.
        local_rank, local_size: the same on this machine.
        connect: gives the store; called in another thread. Not needed by a single process.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.local_size = local_size
        self._local_rank = local_rank
        self._link = _Link(rank, size, connect) if connect is not None else None
        self._exchanges = 0
        self._states: list[_State] = [(0, {})] * size
        self._telling = threading.Lock()
        self._hosts: list[str] = []
        self._ended = False

    @property
    def first(self) -> bool:
        """Whether this is the process that locks, publishes and speaks."""
        return self.rank == 0

    @property
    def default_workers(self) -> int | None:
        """How many threads a process should have that shares its machine; None if it does not."""
        if self.local_size == 1:
            return None
        return max(1, min(4, count_cores() // self.local_size))

    def __enter__(self) -> Processes:
        if self._link is not None:
            try:
                self._link.start()
                self._hosts = self.exchange(os.uname().nodename)
                self._link.watch(self._silent)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._link is None:
            return
        try:
            if error is None:
                self.exchange(None)  # another one may have failed
                with suppress(ProcessesError):
                    self._part()
            elif not isinstance(error, SystemExit):  # --help
                self._end(error)
        except BaseException as failed:
            if error is None:
                self._end(failed)
            raise
        finally:
            self._link.close()

    def exchange(self, value: Any, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Wait for all processes, and learn the value of each.

        Args:
            value: of this process, for JSON.
            meanwhile: called now and then while others are awaited.

        Returns:
            The values by rank.

        Raises:
            BaseException: what another process failed with; see `check`.
        """
        if self._link is None:
            return [value]
        turn, self._exchanges = self._exchanges, self._exchanges + 1
        self._link.put(f"exchange/{turn}/{self.rank}", [value, self._states[self.rank]])
        if self.first:
            keys = [f"exchange/{turn}/{rank}" for rank in range(self.size)]
            answers = self._await(keys, meanwhile)
            for rank, (_, state) in enumerate(answers):
                self._hear(rank, state)
            values = [value for value, _ in answers]
            self._link.put(f"exchange/{turn}", values)
            return values
        (values,) = self._await([f"exchange/{turn}"], meanwhile)
        return list(values)

    def tell(self, **state: Any) -> None:
        """Let the first process know something within a second, or with the next exchange.

        Several threads may call it.

        Args:
            state: values for JSON, which must not change afterwards.
        """
        with self._telling:
            number, before = self._states[self.rank]
            self._states[self.rank] = (number + 1, {**before, **state})
            if self._link is not None:
                self._link.state = self._states[self.rank]

    def told(self) -> list[Mapping[str, Any]]:
        """What each process has told so far; only the first one knows, and calls this."""
        if self._link is not None:
            for rank, state in list(self._link.heard.items()):
                self._hear(rank, state)
        return [state for _, state in self._states]

    def _hear(self, rank: int, state: _State) -> None:
        with self._telling:
            self._states[rank] = max(self._states[rank], state, key=lambda state: state[0])

    def check(self) -> None:
        """Stop here if another process failed or is gone.

        Raises:
            StreamMergeError: the same as there.
            ProcessesError: one is gone.
            KeyboardInterrupt, Terminated: it was interrupted or terminated.
        """
        if self._link is None or self._ended:
            return
        if self._link.failure is not None:
            _ignore_signals()
            raise _error_of(self._link.failure)
        self._link.check()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Interrupt the block, which does not call `check`, when that would raise."""
        if self._link is None:
            yield
            return
        try:
            self._link.interrupts = True
            yield
        except KeyboardInterrupt:
            self.check()
            raise
        finally:
            self._link.interrupts = False
        self.check()

    @contextmanager
    def ending_first(self) -> Iterator[None]:
        """If the block fails, let all other processes end before its error goes on."""
        try:
            yield
        except BaseException as error:
            if self._link is not None:
                self._end(error)
            raise

    # --- waiting ---

    def _await(self, keys: Sequence[str], meanwhile: Callable[[], None] | None) -> list[Any]:
        assert self._link is not None
        started = time.monotonic()
        pause, longest = _POLL_SECONDS
        while (values := self._link.get(keys)) is None:
            self.check()
            if meanwhile is not None:
                meanwhile()
            if not self._hosts and time.monotonic() - started > _JOIN_SECONDS:
                self._fail_to_join()
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)
        return values

    def _fail_to_join(self) -> NoReturn:
        assert self._link is not None
        link = self._link
        missing = [r for r in range(self.size) if link.get([f"exchange/0/{r}"]) is None]
        raise ProcessesError(
            f"{_processes(missing)} of {self.size} did not come within {_JOIN_SECONDS:.0f} s",
            hint="torchrun must start streammerge in all of them; for a single merge inside a job "
            "of torchrun, unset TORCHELASTIC_RUN_ID",
        )

    def _silent(self, ranks: Sequence[int]) -> ProcessesError:
        """The error where processes give no sign of life."""
        hosts = sorted({self._hosts[rank] for rank in ranks}) if self._hosts else []
        where = f" ({', '.join(hosts[:3])})" if hosts else ""
        gone = "is" if len(ranks) == 1 else "are"
        return ProcessesError(
            f"{_processes(ranks)} of {self.size}{where} {gone} gone without a word", hint=_HINT
        )

    # --- ending ---

    def _end(self, error: BaseException) -> None:
        """Let all processes end with an error.

        Raises:
            SaidElsewhere: another process says it.
            BaseException: the error, if there is a better one than the one given.
        """
        if self._ended:
            return
        self._ended = True
        assert self._link is not None
        _ignore_signals()  # torchrun sends them as soon as the first process has ended
        best, speaks = error, self._local_rank == 0  # if nobody can be asked
        with suppress(ProcessesError):
            failure = self._link.fail(_failure(self.rank, error))
            if failure["by"] != self.rank and _is_interruption(error):
                best = _error_of(failure)
            missing, first_lives = self._part()
            if missing and _is_interruption(best):
                best = self._silent(missing)
            speaks = self.first or (not first_lives and failure["by"] == self.rank)
        if not speaks:
            raise SaidElsewhere(best) from None
        if best is not error:
            raise best from None

    def _part(self) -> tuple[list[int], bool]:
        """Leave, and wait until all have left.

        Returns:
            The ranks that are gone without having left, and whether the first process is there.
        """
        assert self._link is not None
        self._ended = True
        self._link.put(f"left/{self.rank}", self._states[self.rank])
        self._link.watch_no_more()
        deadline = time.monotonic() + _LEAVING_SECONDS
        others = [rank for rank in range(self.size) if rank != self.rank]
        while time.monotonic() < deadline:
            if not self.first:
                if (answer := self._link.get(["left"])) is not None:
                    return list(answer[0]), True
                if self._link.silent([0], _LEAVING_SILENCE_SECONDS):
                    return [0], False
            else:
                others = [rank for rank in others if not self._has_left(rank)]
                silent = self._link.silent(others, _LEAVING_SILENCE_SECONDS)
                if silent == others:  # or there are none
                    self._link.put("left", silent)
                    return silent, True
            time.sleep(_POLL_SECONDS[0])
        return [], True

    def _has_left(self, rank: int) -> bool:
        assert self._link is not None
        answer = self._link.get([f"left/{rank}"])
        if answer is not None:
            self._hear(rank, answer[0])
        return answer is not None


class _Link:
    """The store, and the thread that talks to it."""

    def __init__(self, rank: int, size: int, connect: Callable[[], Store]) -> None:
        self.state: _State = (0, {})
        self.heard: dict[int, _State] = {}
        self.failure: dict[str, Any] | None = None
        self.interrupts = False
        self._rank, self._size = rank, size
        self._connect = connect
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._broken: Exception | None = None
        self._watched: Callable[[Sequence[int]], ProcessesError] | None = None
        # The first process watches all others, these watch the first.
        self._others = [r for r in (range(size) if rank == 0 else (0,)) if r != rank]
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._count = 0
        self._turned = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it has not got stuck."""
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(_BEAT_SECONDS)

    def watch(self, describe: Callable[[Sequence[int]], ProcessesError]) -> None:
        """From now on, when all have come, fail with this error if others are silent."""
        now = time.monotonic()
        for rank in self._others:
            self._beats.setdefault(rank, (b"", now))
        self._watched = describe

    def watch_no_more(self) -> None:
        """Others may end."""
        self._watched = None

    def check(self) -> None:
        """Raise `ProcessesError` if the store cannot be reached."""
        if self._broken is not None:
            if isinstance(self._broken, StreamMergeError):
                raise self._broken
            raise ProcessesError(
                f"the connection between the processes is lost ({_one_line(self._broken)})",
                hint=_HINT,
            )
        if time.monotonic() - self._turned > _SILENCE_SECONDS + _BEAT_SECONDS:
            raise ProcessesError(
                f"the store that torchrun keeps has not answered for {_SILENCE_SECONDS:.0f} s",
                hint=_HINT,
            )

    def put(self, key: str, value: Any) -> None:
        self._do(lambda store: store.set(key, json.dumps(value)))

    def get(self, keys: Sequence[str]) -> list[Any] | None:
        """The values of keys, or None if one is not there yet."""

        def look(store: Store) -> list[bytes] | None:
            return store.multi_get(list(keys)) if store.check(list(keys)) else None

        found = self._do(look)
        return None if found is None else list(map(json.loads, found))

    def fail(self, failure: Mapping[str, Any]) -> dict[str, Any]:
        """Make a failure known, and learn which was the first."""
        first = self._do(lambda store: store.compare_set("failure", "", json.dumps(failure)))
        self.failure = json.loads(first)
        assert self.failure is not None
        return self.failure

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Which of these have given no sign of life for so long."""
        now = time.monotonic()
        return [r for r in ranks if r not in self._beats or now - self._beats[r][1] > seconds]

    # --- in the main thread ---

    def _do(self, operation: Callable[[Store], Any]) -> Any:
        request = _Request(operation)
        self._requests.put(request)
        while not request.done.wait(_BEAT_SECONDS):
            self.check()
        if request.error is not None:
            self._broken = self._broken or request.error
            self.check()
        return request.result

    # --- in the other thread ---

    def _loop(self) -> None:
        try:
            store = self._connect()
            next_beat = 0.0
            while True:
                now = self._turned = time.monotonic()
                if now >= next_beat:
                    self._beat(store)
                    next_beat = now + _BEAT_SECONDS
                try:
                    request = self._requests.get(timeout=max(0.0, next_beat - now))
                except queue.Empty:
                    continue
                if request is None:
                    return
                try:
                    request.result = request.operation(store)
                except Exception as error:
                    request.error = error
                request.done.set()
        except Exception as error:
            self._broken = error
            self._interrupt()

    def _interrupt(self) -> None:
        if self.interrupts:
            self.interrupts = False
            main = threading.main_thread().ident
            if main is not None and callable(signal.getsignal(signal.SIGINT)):
                signal.pthread_kill(main, signal.SIGINT)  # this ends system calls too

    def _beat(self, store: Store) -> None:
        self._count += 1
        store.set(f"beat/{self._rank}", json.dumps([self._count, self.state]))
        if self.failure is None and store.check(["failure"]):
            self.failure = json.loads(store.get("failure"))
        self._listen(store)
        describe = self._watched
        if describe is not None and self.failure is None:
            silent = self.silent(self._others, _SILENCE_SECONDS)
            if silent:
                error = json.dumps(_failure(self._rank, describe(silent)))
                self.failure = json.loads(store.compare_set("failure", "", error))
        if self.failure is not None:
            self._interrupt()

    def _listen(self, store: Store) -> None:
        now = time.monotonic()
        keys = {rank: f"beat/{rank}" for rank in self._others}
        if len(self._beats) < len(keys):  # not all have come yet
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        if not keys:
            return
        for rank, beat in zip(keys, store.multi_get(list(keys.values())), strict=True):
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
                _, self.heard[rank] = json.loads(beat)


def join() -> Processes:
    """The processes that torchrun started, this one among them; or this one alone.

    Raises:
        UsageError: what torchrun says in the environment makes no sense.
        UnsupportedError: torch cannot be imported.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Processes()
    size = _number("WORLD_SIZE", least=1)
    rank = _number("RANK", least=0)
    if rank >= size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={size}")
    if size == 1:
        return Processes()
    # Its warnings about lost connections are said here in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise UnsupportedError(
            f"several processes need torch, which cannot be imported ({error})",
            hint="merge with one process, without torchrun",
        ) from error

    number = next(_meetings)

    def connect() -> Store:
        from datetime import timedelta

        timeout = timedelta(seconds=_SILENCE_SECONDS)
        whole, *_ = next(rendezvous("env://", timeout=timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store: Store = PrefixStore(f"streammerge/{attempt}/{number}", whole)
        return store

    return Processes(
        rank,
        size,
        local_rank=_number("LOCAL_RANK", least=0),
        local_size=_number("LOCAL_WORLD_SIZE", least=1),
        connect=connect,
    )


def _number(name: str, *, least: int) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{name}={text!r} in the environment, expected a number from {least} on")
    return int(text)


def _processes(ranks: Sequence[int]) -> str:
    text = f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ignore_signals() -> None:
    with suppress(ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


# --- errors as data ---


def _is_interruption(error: BaseException) -> bool:
    return not isinstance(error, Exception)


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    if isinstance(error, Exception) and not isinstance(error, StreamMergeError):
        error = ProcessesError(
            f"process {rank}: unexpected {type(error).__name__}: {error}",
            hint="run it again with --debug and report what it shows",
        )
    cause = error.__cause__
    return {
        "by": rank,
        "kind": type(error).__name__,
        "message": str(error),
        "hint": getattr(error, "hint", None),
        "system": str(cause.strerror) if isinstance(cause, OSError) else None,
    }


def _error_of(failure: Mapping[str, Any]) -> BaseException:
    """The inverse of `_failure`."""
    kind, message = failure["kind"], failure["message"]
    if kind in _INTERRUPTIONS:
        return _INTERRUPTIONS[kind](*([message] if message else []))
    error: StreamMergeError = getattr(errors, kind)(message, hint=failure["hint"])
    if failure["system"] is not None:
        error.__cause__ = OSError(failure["system"])
    return error


_INTERRUPTIONS = {kind.__name__: kind for kind in (KeyboardInterrupt, Terminated)}
