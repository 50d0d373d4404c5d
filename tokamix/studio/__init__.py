"""`tokamix studio`: a local page to look at what models do, with Gradio."""

from tokamix.studio.app import create_app, run_studio, start_studio
from tokamix.studio.settings import StudioSettings

__all__ = ["StudioSettings", "create_app", "run_studio", "start_studio"]
