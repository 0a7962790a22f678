"""Shows how far a merge is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from streammerge.phases import Progress
from streammerge.render import size

if TYPE_CHECKING:
    from tqdm import tqdm

_LABELS = {
    "check": "checking CRC-32",
    "compare": "comparing copies",
    "write": "merging",
    "verify": "verifying",
    "measure": "measuring differences",
}
_SECONDS_PER_LINE = 10.0
_DEFAULT_COLUMNS = 80


def _knows_its_size(stream: TextIO) -> bool:
    """Some terminals of containers and remote commands say 0 by 0; tqdm would show nothing."""
    try:
        return 0 not in os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    known = _knows_its_size(stream)
    return os.get_terminal_size(stream.fileno()).columns if known else _DEFAULT_COLUMNS


class ProgressDisplay:
    """A context manager whose instance is the progress callback of `merge`.

    Args:
        stream: where to show it, usually stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._phase = ""
        self._bar: tqdm[NoReturn] | None = None
        self._phase_started = 0.0
        self._there = 0  # written by a merge that was interrupted
        self._last_line = 0.0

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is not None and self._terminal and self._phase:
            # Ctrl-C in the middle of drawing or closing the bar leaves it where it is.
            self._stream.write(f"\r{' ' * (_columns(self._stream) - 1)}\r")

    def __call__(self, progress: Progress) -> None:
        """Show the state of a merge."""
        if progress.phase != self._phase:
            self._begin(progress)
        if self._bar is not None:
            self._bar.update(progress.done - self._bar.n)
        elif not self._terminal:
            self._line(progress)

    def _begin(self, progress: Progress) -> None:
        self._phase = progress.phase
        self._phase_started = self._last_line = time.monotonic()
        self._there = progress.done
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._terminal and progress.total:
            from tqdm import tqdm

            self._bar = tqdm(
                total=progress.total,
                initial=progress.done,
                desc=_LABELS[progress.phase],
                unit="B",
                unit_scale=True,
                file=self._stream,
                leave=False,
                ncols=None if _knows_its_size(self._stream) else _DEFAULT_COLUMNS,
                nrows=None if _knows_its_size(self._stream) else 24,
            )

    def _line(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_PER_LINE or not progress.total:
            return
        self._last_line = now
        elapsed = now - self._phase_started
        rate = (progress.done - self._there) / elapsed
        text = (
            f"streammerge: {_LABELS[progress.phase]} "
            f"{size(progress.done)} of {size(progress.total)} "
            f"({progress.done / progress.total:.0%}), {size(rate)}/s"
        )
        if rate:
            text += f", {(progress.total - progress.done) / rate:.0f} s to go"
        print(text, file=self._stream, flush=True)
