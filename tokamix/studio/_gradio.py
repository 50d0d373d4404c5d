"""Gradio without telemetry, or one sentence on how to install it; the studio imports `gr` from here only."""

import atexit
import os
import shutil
import tempfile

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read on import: no telemetry, no version check
# Gradio's statistics of requests, for a page that the studio does not have: they grow, and cost time on each request
os.environ |= {"GRADIO_ANALYTICS_MAX_EVENTS": "1", "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(2**31)}

try:
    import gradio as gr
except ImportError:
    raise ImportError("the studio needs Gradio: pip install 'tokamix[studio]'") from None

# Gradio serves every file of this folder; its default is shared by all Gradio programs of the machine
os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="tokamix-studio-")
atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)

__all__ = ["gr"]
