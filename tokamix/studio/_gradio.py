"""Gradio without telemetry, or one sentence on how to install it; the studio imports `gr` from here only."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read on import: no telemetry, no version check

try:
    import gradio as gr
except ImportError:
    raise ImportError("the studio needs Gradio: pip install 'tokamix[studio]'") from None

__all__ = ["gr"]
