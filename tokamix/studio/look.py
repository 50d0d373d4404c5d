"""The tab Look: what up to three models do with a photo."""

from tokamix.studio._gradio import gr
from tokamix.studio.settings import StudioSettings


def add_look_tab(settings: StudioSettings) -> None:
    """Add the tab to the `gr.Blocks` that is being built."""
    with gr.Tab("Look", id="look"):
        gr.Markdown("What a network does with a photo.")
