"""The tab Detect and segment: a trained detector or segmenter on a photo, with a threshold."""

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamix.data.decode import decode_image
from tokamix.studio._gradio import gr
from tokamix.studio.errors import plain_errors
from tokamix.studio.folders import list_runs
from tokamix.studio.settings import StudioSettings

if TYPE_CHECKING:
    from PIL.Image import Image

    from tokamix.predict import Prediction, Predictor

LOWEST, THRESHOLD = 0.05, 0.3  # detections below the first are not kept; the second is the default of `predict`
SAMPLE_SIDE = 64  # as the pictures of `--data shapes`
MAX_SIDE = 1024  # larger photos are shrunk: drawing and masks would take seconds
NO_RUNS = """No trained detector or segmenter was found below the folders of this studio. A small one, in minutes:

    tokamix train --data shapes --recipe shapes_detect --output runs/shapes
    tokamix studio --folder runs"""


def add_dense_tab(settings: StudioSettings) -> None:
    """Add the tab to the `gr.Blocks` that is being built."""
    with gr.Tab("Detect and segment", id="dense") as tab:
        gr.Markdown("Boxes and masks that a trained detector finds in a photo, or the class of each pixel.")
        hint = gr.Markdown(NO_RUNS, visible=False, elem_id="dense-hint")
        with gr.Row():
            run = gr.Dropdown(label="Trained model", elem_id="dense-run", filterable=False)
            threshold = gr.Slider(
                LOWEST, 0.95, THRESHOLD, step=0.05, label="Smallest score that is shown, for detectors"
            )
        with gr.Row():
            photo = gr.Image(
                type="filepath", label="Photo", sources=["upload", "clipboard"], elem_id="dense-photo", height=320
            )
            result = gr.Image(
                label="What the model finds",
                interactive=False,
                elem_id="dense-result",
                buttons=["download"],
                visible=False,
            )
        sample = gr.Button("Use a generated picture of shapes", elem_id="dense-sample")
        summary = gr.Markdown(elem_id="dense-summary")

    @plain_errors
    def open_dense(chosen: str | None) -> tuple[Any, ...]:
        choices = list_runs(settings, ("segment", "detect"))
        paths = [path for _, path in choices]
        value = chosen if chosen in paths else next(iter(paths), None)
        return gr.update(choices=choices, value=value), gr.update(visible=not choices)

    @plain_errors
    def show(name: str | None, path: str | None, threshold: float) -> tuple[Any, Any]:
        if not path:
            return gr.update(value=None, visible=False), ""
        if not name:
            raise ValueError("choose a trained model first")
        folder = settings.resolve(name)
        changed = (folder / "model.safetensors").stat().st_mtime
        image, prediction = _predict(str(folder), changed, path, settings)
        shown = prediction.above(threshold)
        drawing = _load(str(folder), changed, settings.device).draw(image, shown)
        text = shown.summary()
        return gr.update(value=drawing, visible=True, alt_text=f"The photo with {text}"), f"Found: {text}."

    inputs = [run, photo, threshold]
    tab.select(open_dense, [run], [run, hint], show_progress="hidden")
    sample.click(draw_sample, None, [photo])
    photo.change(show, inputs, [result, summary])
    run.input(show, inputs, [result, summary])
    threshold.change(show, inputs, [result, summary], show_progress="hidden", trigger_mode="always_last")


def draw_sample() -> "Image":
    """A new picture of shapes, as in the data set `shapes`."""
    from torchvision.transforms.functional import to_pil_image

    from tokamix.data.shapes import MAX_LARGE, Shapes

    shapes = Shapes(1, SAMPLE_SIDE, seed=random.randrange(2**31), part="studio", large=MAX_LARGE)
    return to_pil_image(shapes.sample(0).image)


@functools.lru_cache(maxsize=2)
def _load(folder: str, changed: float, device: str | None) -> "Predictor":
    """A model, kept until two others were used; `changed` is the time of its weights."""
    from tokamix.predict import load_predictor

    return load_predictor(folder, device, score_threshold=LOWEST)


@functools.lru_cache(maxsize=4)
def _predict(folder: str, changed: float, path: str, settings: StudioSettings) -> "tuple[Image, Prediction]":
    """A photo and all detections in it, so that the threshold only has to choose among them."""
    image = decode_image(Path(path), "the photo", orient=True)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image, _load(folder, changed, settings.device)(image)
