"""Work that several cells need and that is done, or fails, once."""

from collections.abc import Callable
from typing import TypeVar

from quantdiff.analysis.evaluation import Stopped

__all__ = ["once"]

T = TypeVar("T")


def once(work: Callable[[], T]) -> Callable[[], T]:
    """A function that does some work when it is first called, and then gives what came of it.

    An exception is raised again each time, so that what takes long is not tried again and again;
    `Stopped` is none of these, for the work was not done then.
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
            # Without its traceback, which would grow and hold the tensors of every frame.
            raise failed[0].with_traceback(None)
        return done[0]

    return ask
