"""Work that several cells need and that is done, or fails, only once."""

from collections.abc import Callable
from typing import TypeVar

from quantdiff.analysis.evaluation import Stopped

__all__ = ["once"]

T = TypeVar("T")


def once(work: Callable[[], T]) -> Callable[[], T]:
    """Wrap work in a function that does it on the first call and always returns its result.

    An exception is raised again on each call, so that slow work is not retried over and over.
    After `Stopped` the work is tried again, as it was not done.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def ask() -> T:
        if not done and not failed:
            try:
                done.append(work())
            except Stopped:
                raise
            except Exception as error:
                failed.append(error)
        if failed:
            # Without its traceback, which would grow and keep the tensors of every frame alive.
            raise failed[0].with_traceback(None)
        return done[0]

    return ask
