"""What computing with torch takes: torch itself, a device, and its threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streammerge.errors import UnsupportedError, UsageError

DEVICES = ("auto", "cpu", "cuda")
FOLD_DEVICES = ("cpu", "cuda")


def check_device(device: str, known: Sequence[str] = DEVICES) -> None:
    """Refuse a device that is unknown, or a GPU that torch does not find.

    Raises:
        UsageError: such a device.
        UnsupportedError: a GPU, and torch cannot be imported.
    """
    if device not in known:
        raise UsageError(f"unknown device {device!r}, expected one of {', '.join(known)}")
    if device == "cuda":
        import_torch("--device cuda", hint="use --device cpu")
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU", hint="use --device cpu")


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
