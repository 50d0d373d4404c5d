"""The tab Look: what up to three models do with a photo, token by token."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tokamix.explain import QUESTIONS, Explanation
from tokamix.explain.figures import draw_comparison
from tokamix.explain.mixing import count_heads
from tokamix.studio._gradio import gr
from tokamix.studio.errors import plain_errors
from tokamix.studio.explainers import Explainers, list_sources
from tokamix.studio.photos import SAMPLES, PhotoStore, photo_input
from tokamix.studio.pictures import render_board
from tokamix.studio.settings import StudioSettings
from tokamix.studio.view import MAX_MODELS, View

SCRIPT = Path(__file__).with_name("look.js")
SET_ADDRESS = "(query) => { history.replaceState(null, '', '?' + query) }"
SAVE_FILE = """(address) => {
  const link = document.createElement('a');
  link.href = address; link.download = 'tokamix.png'; link.click();
}"""
INTRO = (
    "Click on a picture, or move the focus there and use the arrow keys, to choose a **token**: a patch of the image"
    " that the network exchanges information about. All pictures follow."
)


class Look:
    """What the tab computes, without the page."""

    def __init__(self, settings: StudioSettings) -> None:
        self.photos = PhotoStore(settings)
        self.explainers = Explainers(settings, self.photos)

    def explain(self, view: View) -> list[Explanation]:
        """The explanation of the view's photo by each of its models."""
        return [self.explainers.explain(view.photo, model) for model in view.models]

    def draw(self, view: View) -> str:
        """The pictures, as HTML."""
        with self.explainers.lock:
            return render_board(self.explain(view), view)

    def count(self, view: View) -> tuple[int, int]:
        """The largest numbers of layers and heads of the models."""
        captures = [explanation.capture for explanation in self.explain(view)]
        return max(map(len, captures)), max(count_heads(layer) for capture in captures for layer in capture)

    def save(self, view: View) -> str:
        """The pictures as one PNG file, as the address of an image."""
        maps = [key for key in view.pictures if QUESTIONS[key].style != "curve"]
        layer, head = (number - 1 if number else None for number in (view.layer, view.head))
        with self.explainers.lock:
            figure = draw_comparison(self.explain(view), (view.y, view.x), layer, questions=maps, head=head)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=200, bbox_inches="tight", pad_inches=0.06)
        return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def add_look_tab(settings: StudioSettings) -> Look:
    """Add the tab to the `gr.Blocks` that is being built; returns what answers its requests."""
    look, start = Look(settings), View()
    questions = [(question.title, key) for key, question in QUESTIONS.items()]
    with gr.Tab("Look", id="look"), gr.Row(elem_id="look"):
        with gr.Column(scale=1, min_width=280):
            photo = gr.State(start.photo)
            sample = gr.Radio(SAMPLES, value=start.photo, label="Sample photo", elem_id="look-sample")
            upload = photo_input(
                label="Your photo", sources=["upload", "clipboard", "webcam"], height=180, elem_id="look-photo"
            )
            models = gr.Dropdown(
                list_sources(settings),
                value=list(start.models),
                label=f"Models, up to {MAX_MODELS}",
                info="trained weights of the package, your runs, or any name of timm",
                multiselect=True,
                allow_custom_value=True,
                elem_id="look-models",
            )
            pictures = gr.Dropdown(
                questions, value=list(start.pictures), label="Pictures", multiselect=True, elem_id="look-pictures"
            )
            layer = gr.Slider(0, 8, 0, step=1, label="Layer (0: a late one)", elem_id="look-layer")
            head = gr.Slider(0, 6, 0, step=1, label="Head (0: mean of all)", elem_id="look-head")
            with gr.Row():
                y = gr.Slider(0, 1, start.y, step=0.01, label="Token: from the top", elem_id="look-y", min_width=120)
                x = gr.Slider(0, 1, start.x, step=0.01, label="Token: from the left", elem_id="look-x", min_width=120)
            with gr.Row():
                save = gr.Button("Download PNG", elem_id="look-save", min_width=120)
                link = gr.HTML(elem_id="look-link")
        with gr.Column(scale=3, min_width=300):
            gr.Markdown(INTRO)
            query, file = gr.Textbox(visible=False), gr.Textbox(visible=False)
            board = gr.HTML(elem_id="look-board", js_on_load=SCRIPT.read_text(encoding="utf-8"))

    def show(view: View) -> tuple[str, str, str]:
        return look.draw(view), f'<a href="?{view.query}">Link to this view</a>', view.query

    def limits(view: View) -> tuple[Any, Any]:
        layers, heads = look.count(view)
        return gr.update(maximum=layers), gr.update(maximum=heads)

    @plain_errors
    def draw(*values: Any) -> tuple[Any, ...]:
        return show(to_view(values))

    @plain_errors
    def choose_models(*values: Any) -> tuple[Any, ...]:
        view = to_view(values)
        return *limits(view), *show(view)

    @plain_errors
    def choose_token(event: gr.EventData, *values: Any) -> tuple[Any, ...]:
        view = to_view([*values[:-2], round(float(event.y), 3), round(float(event.x), 3)])
        return view.y, view.x, *show(view)

    @plain_errors
    def take_photo(path: str | None, *values: Any) -> tuple[Any, ...]:
        if path is None:
            return (gr.skip(),) * (3 + len(drawn))
        key = look.photos.add(path)
        return key, None, None, *show(to_view([key, *values[1:]]))

    @plain_errors
    def choose_sample(name: str, *values: Any) -> tuple[Any, ...]:
        return name, *show(to_view([name, *values[1:]]))

    @plain_errors
    def open_link(request: gr.Request) -> tuple[Any, ...]:
        try:
            view = View.from_query(dict(request.query_params))
            pictures = show(view)
        except (ValueError, OSError) as error:  # the page opens all the same
            gr.Warning(f"The link cannot be opened: {escape(str(error), quote=False)}", duration=None)
            view = start
            pictures = show(view)
        layers, heads = look.count(view)
        sliders = gr.update(value=view.layer, maximum=layers), gr.update(value=view.head, maximum=heads)
        return view.photo, view.photo, list(view.models), list(view.pictures), *sliders, view.y, view.x, *pictures

    @plain_errors
    def save_png(*values: Any) -> str:
        return look.save(to_view(values))

    state = [photo, models, pictures, layer, head, y, x]
    drawn = [board, link, query]
    options: dict[str, Any] = {"concurrency_id": "look", "concurrency_limit": 1, "api_visibility": "private"}
    options["show_progress_on"] = board
    quick = options | {"show_progress": "hidden", "trigger_mode": "always_last"}
    shown = [
        gr.context.Context.root_block.load(open_link, None, [photo, sample, *state[1:], *drawn], **options),
        board.select(choose_token, state, [y, x, *drawn], **quick),
        upload.input(take_photo, [upload, *state], [photo, sample, upload, *drawn], **options),
        sample.input(choose_sample, [sample, *state], [photo, *drawn], **options),
        models.input(choose_models, state, [layer, head, *drawn], **options),
        pictures.input(draw, state, drawn, **options),
        gr.on([layer.input, head.input, y.input, x.input], draw, state, drawn, **quick),
    ]
    for event in shown:
        event.success(None, query, None, js=SET_ADDRESS)
    save.click(save_png, state, file, **options).success(None, file, None, js=SAVE_FILE)
    return look


def to_view(values: Sequence[Any]) -> View:
    """The values of the page, in the order of View's fields, as a view."""
    photo, models, pictures, layer, head, y, x = values
    return View(
        str(photo), tuple(models or ()), tuple(pictures or ()), int(layer or 0), int(head or 0), float(y), float(x)
    )
