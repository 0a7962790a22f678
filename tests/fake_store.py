"""What torchrun keeps for processes to meet, within one process."""

from __future__ import annotations

import threading


class FakeStore:
    """What torchrun keeps, in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]  # torch would wait for it

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if self._values.get(key, b"").decode() == expected:
                self._values[key] = desired.encode()
            return self._values[key]
