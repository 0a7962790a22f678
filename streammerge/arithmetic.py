"""What computing with torch in threads takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streammerge.errors import UnsupportedError


def import_torch(purpose: str, hint: str = "install torch") -> None:
    """Import torch before threads start, as importing needs more stack than they have.

    Args:
        purpose, hint: what needs it, and what to do without it, for the error.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs torch, which cannot be imported ({error})", hint=hint
        ) from error


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """No threads inside torch: the workers take this over from here, and are enough."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
