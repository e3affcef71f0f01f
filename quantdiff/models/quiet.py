"""Silencing libraries while quantdiff uses them: it reports what matters itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

__all__ = ["quiet_libraries"]


@contextmanager
def quiet_libraries(*, bars: bool = False) -> Iterator[None]:
    """Suppress warnings of transformers and bitsandbytes.

    On some CPUs bitsandbytes asks for kernels from a hub, which nothing here uses.

    Args:
        bars: whether transformers may show progress bars.
    """
    verbosity = transformers_logging.get_verbosity()
    shown = transformers_logging.is_progress_bar_enabled()
    bitsandbytes = logging.getLogger("bitsandbytes")
    level = bitsandbytes.level
    transformers_logging.set_verbosity_error()
    bitsandbytes.setLevel(logging.ERROR)
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        bitsandbytes.setLevel(level)
        if shown:
            transformers_logging.enable_progress_bar()
