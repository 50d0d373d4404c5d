"""The tab Detect and segment: a trained detector or segmenter on a photo, with a threshold."""

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamix.studio._gradio import gr
from tokamix.studio.errors import plain_errors
from tokamix.studio.folders import list_runs
from tokamix.studio.photos import PhotoStore, photo_input
from tokamix.studio.settings import StudioSettings

if TYPE_CHECKING:
    from PIL.Image import Image

    from tokamix.predict import Prediction, Predictor

LOWEST, THRESHOLD = 0.05, 0.3  # detections below the first are not kept; the second is the default of `predict`
SAMPLE_SIDE = 64  # as the pictures of `--data shapes`
NO_RUNS = """No trained detector or segmenter was found below the folders of this studio. A small one, in minutes:

```bash
tokamix train --data shapes --recipe shapes_detect --output runs/shapes
tokamix studio --folder runs
```"""


class Dense:
    """What the tab computes, without the page: the latest models and predictions are kept."""

    def __init__(self, settings: StudioSettings) -> None:
        self.settings, self.photos = settings, PhotoStore(settings)
        self.load = functools.lru_cache(maxsize=2)(self._load)
        self.predict = functools.lru_cache(maxsize=4)(self._predict)

    def draw(self, name: str | None, photo: str, threshold: float) -> tuple[Any, str]:
        """The photo with what a run's model finds in it, and the same in words; the threshold needs no forward pass."""
        if not photo:
            return gr.update(value=None, visible=False), ""
        if not name:
            raise ValueError("choose a trained model first")
        folder = self.settings.resolve(name)
        changed = (folder / "model.safetensors").stat().st_mtime
        shown = self.predict(folder, changed, photo).above(threshold)
        drawing = self.load(folder, changed).draw(self.photos[photo], shown)
        text = shown.summary()
        return gr.update(value=drawing, visible=True, alt_text=f"The photo with {text}"), f"Found: {text}."

    def _load(self, folder: Path, changed: float) -> "Predictor":
        """Load a model; `changed` is the time of its weights."""
        from tokamix.predict import load_predictor

        return load_predictor(folder, self.settings.device, score_threshold=LOWEST)

    def _predict(self, folder: Path, changed: float, photo: str) -> "Prediction":
        """All detections in a photo, so that the threshold only has to choose among them."""
        prediction: Prediction = self.load(folder, changed)(self.photos[photo])
        return prediction


def add_dense_tab(settings: StudioSettings) -> Dense:
    """Add the tab to the `gr.Blocks` that is being built; returns what answers its requests."""
    dense = Dense(settings)
    with gr.Tab("Detect and segment", id="dense") as tab:
        gr.Markdown("Boxes and masks that a trained detector finds in a photo, or the class of each pixel.")
        hint = gr.Markdown(NO_RUNS, visible=False, elem_id="dense-hint")
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                run = gr.Dropdown(label="Trained model", elem_id="dense-run", filterable=False)
                threshold = gr.Slider(
                    LOWEST, 0.95, THRESHOLD, step=0.05, label="Smallest score that is shown, for detectors"
                )
                upload = photo_input(
                    label="Your photo", sources=["upload", "clipboard", "webcam"], height=180, elem_id="dense-photo"
                )
                sample = gr.Button("Use a generated picture of shapes", elem_id="dense-sample")
            with gr.Column(scale=2, min_width=300):
                result = gr.Image(
                    label="What the model finds",
                    interactive=False,
                    elem_id="dense-result",
                    buttons=["download"],
                    visible=False,
                )
                summary = gr.Markdown(elem_id="dense-summary")
        photo = gr.State("")

    @plain_errors
    def open_dense(chosen: str | None) -> tuple[Any, ...]:
        choices = list_runs(settings, ("segment", "detect"))
        paths = [path for _, path in choices]
        value = chosen if chosen in paths else next(iter(paths), None)
        return gr.update(choices=choices, value=value), gr.update(visible=not choices)

    @plain_errors
    def show_dense(name: str | None, photo: str, threshold: float) -> tuple[Any, str]:
        return dense.draw(name, photo, threshold)

    @plain_errors
    def take_dense_photo(path: str | None, name: str | None, threshold: float) -> tuple[Any, ...]:
        if path is None:
            return (gr.skip(),) * 4
        photo = dense.photos.add(path)
        return photo, None, *dense.draw(name, photo, threshold)

    @plain_errors
    def use_sample(name: str | None, threshold: float) -> tuple[Any, ...]:
        photo = dense.photos.keep(draw_sample())
        return photo, *dense.draw(name, photo, threshold)

    options: dict[str, Any] = {"concurrency_id": "dense", "concurrency_limit": 1, "api_visibility": "private"}
    quick = options | {"show_progress": "hidden", "trigger_mode": "always_last"}
    tab.select(open_dense, [run], [run, hint], **quick)
    sample.click(use_sample, [run, threshold], [photo, result, summary], **options)
    upload.input(take_dense_photo, [upload, run, threshold], [photo, upload, result, summary], **options)
    run.input(show_dense, [run, photo, threshold], [result, summary], **options)
    threshold.change(show_dense, [run, photo, threshold], [result, summary], **quick)
    return dense


def draw_sample() -> "Image":
    """A new picture of shapes, as in the data set `shapes`."""
    from torchvision.transforms.functional import to_pil_image

    from tokamix.data.shapes import MAX_LARGE, Shapes

    shapes = Shapes(1, SAMPLE_SIDE, seed=random.randrange(2**31), part="studio", large=MAX_LARGE)
    return to_pil_image(shapes.sample(0).image)
