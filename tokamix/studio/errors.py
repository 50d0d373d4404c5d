"""Errors of the page: one sentence for each, never a traceback."""

import functools
import logging
from collections.abc import Callable
from html import escape
from typing import Any, TypeVar

from tokamix.studio._gradio import gr

Function = TypeVar("Function", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


def plain_errors(function: Function) -> Function:
    """Show a handler's errors as one sentence: those that users can fix as they are, bugs without details.

    The traceback of a bug is logged. Messages are escaped: they may hold text of a link, and the page takes HTML.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except gr.Error:
            raise
        except (ValueError, OSError, ImportError, KeyError, FloatingPointError) as error:
            raise gr.Error(escape(str(error), quote=False), duration=None, print_exception=False) from None
        except Exception as error:
            if isinstance(error, MemoryError) or "memory" in str(error):
                raise gr.Error("out of memory: choose a smaller image or model", print_exception=False) from None
            logger.exception("%s failed", function.__name__)
            raise gr.Error("this failed because of a bug; the log has the details", print_exception=False) from None

    return call  # type: ignore[return-value]
