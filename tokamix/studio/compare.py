"""The tab Compare: accuracy, speed, memory and counts of models, recorded and measured here, as a plot and a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokamix.bench.results import ModelResult, measured_result, paper_results, read_results, shipped_results
from tokamix.explain.figures import PALETTE
from tokamix.studio._gradio import gr
from tokamix.studio.errors import plain_errors
from tokamix.studio.folders import list_tables
from tokamix.studio.settings import StudioSettings

if TYPE_CHECKING:
    import pandas

# quantity -> its title and digits
QUANTITIES = {
    "accuracy": ("accuracy (%)", 2),
    "images_per_second": ("images per second", 0),
    "milliseconds": ("milliseconds", 2),
    "memory_gb": ("memory (GB)", 3),
    "exps": ("exp calls (millions)", 3),
    "macs": ("MACs (billions)", 3),
    "parameters": ("parameters (millions)", 2),
}
AXES = [(title, name) for name, (title, _) in QUANTITIES.items()]
WORDS = {"model": "model", "setting": "setting", "source": "source"}
MAX_MODELS = 6
SECONDS = 2.0  # of one measurement
Results = list[dict[str, Any]]


def add_compare_tab(settings: StudioSettings) -> None:
    """Add the tab to the `gr.Blocks` that is being built."""
    with gr.Tab("Compare", id="compare") as tab:
        gr.Markdown(
            "What accuracy costs: choose two quantities. Accuracies are recorded ones, of one training each; point at"
            " a mark to read it, or use the table."
        )
        with gr.Row():
            vertical = gr.Dropdown(AXES, value="accuracy", label="Vertical axis", filterable=False)
            horizontal = gr.Dropdown(AXES, value="exps", label="Horizontal axis", filterable=False)
        sources = gr.CheckboxGroup(label="Results", elem_id="sources")
        plot = gr.ScatterPlot(height=380, show_label=False, elem_id="compare-plot", buttons=[])
        summary = gr.Markdown(elem_id="compare-summary")
        table = gr.Dataframe(label="Table", interactive=False, show_label=False, elem_id="compare-table", buttons=[])
        with gr.Accordion("Measure on this machine", open=False):
            names = [row.model for row in shipped_results()]
            models = gr.Dropdown(
                names,
                value=names[:3],
                multiselect=True,
                max_choices=MAX_MODELS,
                label=f"Models, up to {MAX_MODELS}",
            )
            with gr.Row():
                size = gr.Slider(32, 224, 96, step=32, label="Image size in pixels")
                batch = gr.Slider(1, 16, 1, step=1, label="Images at a time")
            button = gr.Button("Measure", elem_id="measure")
        measured, colours = gr.State([]), gr.State({})
    shown, drawn = [sources, vertical, horizontal, measured], [plot, summary, table, colours]

    @plain_errors
    def open_compare(chosen: list[str] | None, y: str, x: str, own: Results) -> tuple[Any, ...]:
        results = collect_results(settings, own)
        every = list(dict.fromkeys(row.source for row in results))
        chosen = [name for name in chosen or every[:1] if name in every]
        return gr.update(choices=every, value=chosen), *draw(results, chosen, y, x)

    @plain_errors
    def redraw(chosen: list[str], y: str, x: str, own: Results) -> tuple[Any, ...]:
        return draw(collect_results(settings, own), chosen, y, x)

    @plain_errors
    def measure(
        models: list[str],
        size: int,
        batch: int,
        own: Results,
        progress: Any = gr.Progress(),  # noqa: B008
    ) -> tuple[Any, ...]:
        own = own + [row.as_dict() for row in measure_models(models, size, batch, settings.device, progress)]
        results = collect_results(settings, own)
        chosen = ["measured here"]
        every = list(dict.fromkeys(row.source for row in results))
        group = gr.update(choices=every, value=chosen)
        return own, group, "accuracy", "milliseconds", *draw(results, chosen, "accuracy", "milliseconds")

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    # colours come after the points: Gradio draws the legend for the points it has when the colours change
    colours.change(lambda chosen: gr.update(color_map=chosen), colours, plot, **quiet)
    tab.select(open_compare, shown, [sources, *drawn], **quiet)
    for control in (sources, vertical, horizontal):
        control.input(redraw, shown, drawn, **quiet)
    changed = [measured, sources, vertical, horizontal, *drawn]
    button.click(measure, [models, size, batch, measured], changed, api_visibility="private")


def collect_results(settings: StudioSettings, measured: Results) -> list[ModelResult]:
    """All results: of the package, of the papers, of CSV files below the studio's folders, and measured ones."""
    files = [row for path in list_tables(settings) for row in read_results(path)]
    return [*shipped_results(), *paper_results(), *files, *(ModelResult(**row) for row in measured)]


def measure_models(
    models: Sequence[str], size: int, batch: int, device: str | None, progress: Any
) -> list[ModelResult]:
    """Time models in turn, and count their operations."""
    import torch

    from tokamix.bench.runtimes import measure_runtimes

    if not models:
        raise ValueError("choose a model to measure")
    if len(models) > MAX_MODELS:
        raise ValueError(f"choose up to {MAX_MODELS} models to measure, not {len(models)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        progress(len(lines) / (len(models) + 1), desc=line)

    rows = list(measure_runtimes(models, [int(size)], [int(batch)], ["eager"], device, SECONDS, log))
    if not rows:
        raise ValueError(f"nothing could be measured: {lines[-1]}")
    return [measured_result(row) for row in rows]


def draw(
    results: Sequence[ModelResult], sources: Sequence[str], y: str, x: str
) -> tuple[Any, str, Any, dict[str, str]]:
    """For the chosen sources: a plot of two quantities, what it shows in a sentence, a table, and its colours."""
    for name in (x, y):
        if name not in QUANTITIES:
            raise ValueError(f"there is no quantity {name!r}; choose from {', '.join(QUANTITIES)}")
    frame = table_of([row for row in results if row.source in sources])
    (x_title, _), (y_title, _) = QUANTITIES[x], QUANTITIES[y]
    points = frame.dropna(subset=[x_title, y_title])
    points = points.assign(network=points["model"].str.removeprefix("pyramid_nano_"))  # the legend cuts long names
    colour = "network" if points["network"].nunique() <= len(PALETTE) else "source"
    plot = gr.ScatterPlot(
        value=points,
        x=x_title,
        y=y_title,
        color=colour,
        tooltip=["model", "setting", x_title, y_title],
    )
    sentence = _describe(len(frame), len(points), x_title, y_title)
    colours = dict(zip(dict.fromkeys(points[colour]), PALETTE * len(points), strict=False))
    return plot, sentence, frame.dropna(axis="columns", how="all"), colours


def table_of(results: Sequence[ModelResult]) -> "pandas.DataFrame":
    """Results as a table with titles."""
    import pandas

    rows = [
        {WORDS[key]: getattr(row, key) for key in WORDS}
        | {title: round(getattr(row, key), digits) for key, (title, digits) in QUANTITIES.items()}
        for row in results
    ]
    return pandas.DataFrame(rows, columns=[*WORDS.values(), *(title for title, _ in QUANTITIES.values())])


def _describe(rows: int, points: int, x: str, y: str) -> str:
    """What the plot shows, in a sentence."""
    if not rows:
        return "Choose results above."
    if not points:
        return f"None of the {rows} results has both {x} and {y}: choose other axes, or measure models below."
    return f"{points} of {rows} results have both {y} and {x}."
