"""The tab Train: watch and compare runs while they are trained, start a small one, stop it, resume it."""

import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamix.explain.figures import PALETTE
from tokamix.models.shipped import shipped_weights
from tokamix.studio._gradio import gr
from tokamix.studio.errors import plain_errors
from tokamix.studio.folders import list_data, list_runs, resolve_data
from tokamix.studio.jobs import Jobs
from tokamix.studio.settings import StudioSettings
from tokamix.train.output.lock import is_locked
from tokamix.train.output.watch import Point, RunStatus, is_run, read_run

if TYPE_CHECKING:
    import pandas

INTERVAL = 2.0  # seconds between two looks at the runs
MAX_RUNS = 6  # side by side
MAX_PICTURES = 6
MAX_EPOCHS = 200
TASKS = [("classify images", "classify"), ("segment", "segment"), ("detect objects", "detect")]
METRICS = {"top1": "top-1 accuracy (%)", "miou": "mean IoU (%)", "mask_ap": "mask AP (%)", "box_ap": "box AP (%)"}
METRICS |= {"knn": "k-NN accuracy (%)", "vqa": "VQA accuracy (%)"}
NO_FOLDERS = "No folder was named at the start: `tokamix studio --folder runs --folder photos` shows what is in them."


def add_train_tab(settings: StudioSettings) -> None:
    """Add the tab to the `gr.Blocks` that is being built."""
    jobs = Jobs()
    models = list(dict.fromkeys(name.partition(".")[0] for name in shipped_weights()))
    with gr.Tab("Train", id="train") as tab:
        gr.Markdown("Watch runs live and compare them: the files of their folders are read every two seconds.")
        if not settings.folders:
            gr.Markdown(NO_FOLDERS)
        runs = gr.Dropdown(multiselect=True, max_choices=MAX_RUNS, label=f"Runs, up to {MAX_RUNS}", elem_id="runs")
        status = gr.Markdown(elem_id="run-status")
        with gr.Row():
            options: dict[str, Any] = {"height": 300, "buttons": [], "show_label": False}
            loss = gr.LinePlot(elem_id="loss-plot", **options)
            scores = gr.LinePlot(elem_id="score-plot", **options)
        pictures = gr.Gallery(
            label="Latest pictures of the first run",
            columns=3,
            height="auto",
            object_fit="contain",
            elem_id="run-pictures",
            buttons=[],
            visible=False,
        )
        with gr.Accordion("Start a run", open=False):
            gr.Markdown("A folder with a folder of images for each class, or with masks or COCO annotations.")
            with gr.Row():
                data = gr.Dropdown(label="Data", elem_id="data", filterable=False)
                task = gr.Dropdown(TASKS, label="Task", value="classify", filterable=False)
                model = gr.Dropdown(models, label="Network", value=models[0], filterable=False)
            with gr.Row():
                epochs = gr.Slider(1, MAX_EPOCHS, 10, step=1, label="Epochs")
                pretrained = gr.Checkbox(True, label="Start from the shipped weights")
            start = gr.Button("Start", variant="primary", elem_id="start")
        with gr.Row():
            stop = gr.Button("Stop the run of this studio", elem_id="stop")
            resume = gr.Button("Resume the first run", elem_id="resume")
        log = gr.Textbox(label="What the run prints", lines=4, max_lines=8, interactive=False, elem_id="run-log")
        seen, colours = gr.State(""), gr.State({})  # what the page shows already, and in which colours
        timer = gr.Timer(INTERVAL, active=False)
    shown = [status, loss, scores, pictures, log, seen, colours]

    @plain_errors
    def open_train(chosen: list[str] | None) -> tuple[Any, ...]:
        choices, sets = list_runs(settings), list_data(settings)
        paths = [path for _, path in choices]
        chosen = [path for path in chosen or paths[:1] if path in paths]
        folder = gr.update(choices=sets, value=sets[0][1])
        return gr.update(choices=choices, value=chosen), folder, gr.update(active=True), *show_runs(chosen, "")

    def show_runs(chosen: Sequence[str], before: str) -> tuple[Any, ...]:
        found = [read_run(settings.resolve(name)) for name in chosen[:MAX_RUNS]]
        images = [settings.resolve(str(path)) for path in found[0].pictures()[:MAX_PICTURES]] if found else []
        text = "\n".join([describe(run) for run in found] or ["Choose a run, or start one."])
        key = repr((chosen, text, jobs.log(), [(path, path.stat().st_mtime) for path in images]))
        if key == before:
            return (gr.skip(),) * len(shown)
        gallery = gr.update(value=load_pictures(images), visible=bool(images))
        *plots, chosen_colours = draw_curves(found)
        return text, *plots, gallery, jobs.log(), key, chosen_colours

    @plain_errors
    def watch(chosen: list[str] | None, before: str) -> tuple[Any, ...]:
        return show_runs(chosen or [], before)

    @plain_errors
    def start_run(source: str, task: str, model: str, epochs: float, pretrained: bool) -> Any:
        if task not in dict(TASKS).values() or model not in models:
            raise ValueError(f"the studio does not train {model} for {task}")
        source = resolve_data(settings, source or "")
        folder = next_folder(settings, f"{Path(source).name}-{model}")
        epochs = min(MAX_EPOCHS, max(1, int(epochs)))
        arguments = ["--data", source, "--task", task, "--model", model, "--epochs", str(epochs), "--log-every", "5"]
        arguments += ["--output", str(folder), "--set", "eval_every=1", *(["--pretrained"] if pretrained else [])]
        return begin(arguments, folder)

    @plain_errors
    def resume_run(chosen: list[str] | None) -> Any:
        if not chosen:
            raise ValueError("choose the run to resume first")
        run = read_run(settings.resolve(chosen[0]))
        if run.state != "stopped":
            raise ValueError(f"{run.folder.name} is {run.state}; only a stopped run can be resumed")
        source = resolve_data(settings, run.settings["data"])
        # a recipe for fine-tuning asks for weights to start from; the saved state then replaces them
        weights = ["--pretrained"] if run.settings.get("finetune") else []
        return begin(["--resume", str(run.folder), "--data", source, *weights], run.folder)

    def begin(arguments: list[str], folder: Path) -> Any:
        device = ["--device", settings.device] if settings.device else []
        jobs.start([*arguments, *device], lambda: is_run(folder) and is_locked(folder))
        return gr.update(choices=list_runs(settings), value=[str(folder)])

    @plain_errors
    def stop_run() -> None:
        jobs.stop()
        gr.Info("The run saves its state and stops.")

    private: dict[str, Any] = {"api_visibility": "private"}
    quiet = private | {"show_progress": "hidden"}
    # colours come after the points: Gradio draws the legend for the points it has when the colours change
    colours.change(lambda chosen: [gr.update(color_map=chosen)] * 2, colours, [loss, scores], **quiet)
    tab.select(open_train, [runs], [runs, data, timer, *shown], **quiet)
    timer.tick(watch, [runs, seen], shown, **quiet)
    runs.input(watch, [runs, seen], shown, **quiet)
    start.click(start_run, [data, task, model, epochs, pretrained], [runs], **private)
    resume.click(resume_run, [runs], [runs], **private)
    stop.click(stop_run, **quiet)


def describe(run: RunStatus) -> str:
    """A run in one line: its state, position, the result that counts and the time left."""
    done = run.update / run.steps if run.steps else 0.0
    parts = [f"epoch {min(run.epochs, math.floor(done) + (run.state != 'finished'))} of {run.epochs}"]
    metric = run.metric
    if metric in run.best:
        kind = "last" if run.settings.get("select") == "last" else "best"
        parts.append(f"{kind} {METRICS[metric].removesuffix(' (%)')} {run.best[metric]:.1f} %")
    left = run.seconds_left() if run.state == "running" else None
    if left is not None:
        parts.append(f"{format_seconds(left)} left, evaluation not counted")
    return f"- **{run.folder.name}** ({run.settings.get('model')}): {run.state}, {', '.join(parts)}"


def format_seconds(seconds: float) -> str:
    """A duration in two units: 42 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def draw_curves(runs: Sequence[RunStatus]) -> tuple[Any, Any, dict[str, str]]:
    """Plots of the loss and of the metric, and the colours of both; compared runs show their validation alone."""
    metric = runs[0].metric if runs else ""
    titles = "loss", METRICS.get(metric, "score (%)")
    tables = frame(runs, [run.loss() for run in runs]), frame(runs, [run.scores() for run in runs])
    first, second = (
        gr.LinePlot(
            value=table,
            x="epoch",
            y="value",
            color="curve",
            y_title=title,
        )
        for title, table in zip(titles, tables, strict=True)
    )
    names = dict.fromkeys(name for table in tables for name in table["curve"])
    return first, second, dict(zip(names, PALETTE * len(names), strict=False))


def frame(runs: Sequence[RunStatus], curves: Sequence[Sequence[Point]]) -> "pandas.DataFrame":
    """Points of the curves of one or several runs as a table."""
    import pandas

    several = len(runs) > 1
    rows = [
        (point.epoch, point.value, run.folder.name + point.kind.removeprefix("validation") if several else point.kind)
        for run, points in zip(runs, curves, strict=True)
        for point in points
        if not several or point.kind != "training"
    ]
    return pandas.DataFrame(rows, columns=["epoch", "value", "curve"])


def load_pictures(paths: Sequence[Path]) -> list[tuple[Any, str]]:
    """Pictures with captions, read here: the page gets no path."""
    from PIL import Image

    pictures = []
    for path in paths:
        with Image.open(path) as image:
            pictures.append((image.convert("RGB"), path.stem.replace("_", " ")))
    return pictures


def next_folder(settings: StudioSettings, name: str) -> Path:
    """A new folder for a run: NAME, NAME-2, ... in `runs` of the first folder of the studio."""
    if not settings.folders:
        raise ValueError("there is no folder for a run; start the studio with --folder")
    parent = settings.folders[0].resolve() / "runs"
    paths = (parent / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())
