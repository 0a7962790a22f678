"""Notices which output files are complete, where several processes write parts of them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streammerge.errors import ResultError
from streammerge.journal import Journal
from streammerge.output_files import check_file
from streammerge.planner import Plan
from streammerge.shares import FileRange


class Completion:
    """Counts the parts of files that several processes have written, and records whole files.

    Args:
        plan: what is written.
        directory: where to.
        journal: gets each file that is complete, after a look at its size and header.
        shares: what each process writes.
    """

    def __init__(
        self,
        plan: Plan,
        directory: str,
        journal: Journal,
        shares: Sequence[Sequence[FileRange]],
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._journal = journal
        self._lock = threading.Lock()
        self._missing = {(rank, part.file) for rank, share in enumerate(shares) for part in share}
        self._parts = Counter(file for _, file in self._missing)

    def add(self, rank: int, files: Iterable[int]) -> None:
        """Note that a process has its parts of these files on the disk, once or again.

        Raises:
            ResultError: a file is complete, but not what was written.
        """
        for index in files:
            with self._lock:
                if (rank, index) not in self._missing:
                    continue
                self._missing.remove((rank, index))
                self._parts[index] -= 1
                complete = self._parts[index] == 0
            if complete:
                file = self._plan.files[index]
                path = os.path.join(self._directory, *file.name.split("/"))
                self._journal.record_written(check_file(path, file.name, file.size, file.header))

    def add_told(self, told: Sequence[Mapping[str, Any]]) -> None:
        """The same, of all processes: each tells, as ``written``, which parts it has written."""
        for rank, state in enumerate(told):
            self.add(rank, state.get("written", ()))

    def check_all(self) -> None:
        """Check that no part is missing, once all processes have written their shares.

        Raises:
            ResultError: a process has not told that it has written one of its parts.
        """
        with self._lock:
            missing = sorted(self._missing)
        if missing:
            rank, index = missing[0]
            name = self._plan.files[index].name
            raise ResultError(f"{self._directory}/{name}: process {rank} has not written its part")
