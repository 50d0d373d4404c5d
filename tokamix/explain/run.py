"""`explain`: figures and a page about what models do with one image, and over a folder of images."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokamix.explain import figures
from tokamix.explain.explainer import POSITION, Explainer, Explanation, load_explainer
from tokamix.explain.figures import FORMATS, PALETTE, drawing, save_figure
from tokamix.explain.mixing import count_heads
from tokamix.explain.page import Section, render_page
from tokamix.explain.questions import AMIXER, ATM, CB, QUESTIONS
from tokamix.explain.statistics import Statistics, collect_statistics
from tokamix.files import write_text
from tokamix.predict.predictor import ImageLike

MAX_HEADS = 6  # heads of a layer that are drawn
Draw = Callable[[str], Any]  # theme -> figure
Progress = Callable[[str, int, int], object]


class Item(NamedTuple):
    """A figure to draw: name of its file, heading, text, paper, and the function that draws it in a theme."""

    name: str
    title: str
    text: str
    link: str
    source: str
    draw: Draw


@dataclass
class ExplainResult:
    """The result of `explain`.

    Attributes:
        page: the HTML page.
        files: the figures.
        explanations: of each model, to ask further questions.
        statistics: over the folder of images, by name of the model; {} without a folder.
    """

    page: Path
    files: list[Path]
    explanations: list[Explanation]
    statistics: dict[str, Statistics] = field(default_factory=dict)


def explain(
    image: ImageLike,
    models: Any,
    output: str | Path = "explained",
    *,
    checkpoint: str | Path | None = None,
    position: tuple[float, float] = POSITION,
    layer: int | str | None = None,
    data: str | Path | None = None,
    batch_size: int = 16,
    formats: Sequence[str] = ("png",),
    theme: str = "light",
    device: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> ExplainResult:
    """Draw what models do with an image, as the papers do, and write one self-contained page, index.html.

    Args:
        image: a file, a PIL image, or an array (H, W, 3) of uint8.
        models: a run's folder, a timm name, a module, an `Explainer`, or a list of these to compare.
        output: folder for the figures and the page.
        checkpoint: weights file of the first model, if that is the name of an architecture.
        position: of the explained token, in fractions of the image's height and width.
        layer: index or name of the layer whose token is explained; None: the last with a grid worth a picture.
        data: a folder of images for statistics by layer: offsets, entropies and mixing distances.
        batch_size: images of one forward pass over the folder.
        formats: of the figures: "png", "svg", "pdf".
        theme: of the figures, "light" or "dark"; the page has both.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        progress: called with a description, the number of steps done and their total.
    """
    if bad := [form for form in formats if form not in FORMATS]:
        raise ValueError(f"figures are written as {', '.join(FORMATS)}, not as {bad[0]!r}")
    with drawing(theme):  # matplotlib and theme are checked before anything is computed
        pass
    explainers = _load(models, checkpoint, device)
    if len(explainers) > len(PALETTE):
        raise ValueError(f"at most {len(PALETTE)} models fit into one figure, got {len(explainers)}")
    explanations = [explainer(image) for explainer in explainers]
    statistics = {}
    if data is not None:
        for explainer in explainers:
            report = partial(progress, f"images through {explainer.name}")
            statistics[explainer.name] = collect_statistics(explainer, data, batch_size, report)
    items = [*_items(explanations, position, layer), *_statistics_items(statistics)]
    output, files, sections = Path(output), [], []
    for number, item in enumerate(items):
        drawn = {name: item.draw(name) for name in ("light", "dark")}
        files += save_figure(drawn[theme], output / item.name, formats)
        sections.append(Section(item.title, item.text, item.link, item.source, drawn["light"], drawn["dark"]))
        progress("figures", number + 1, len(items))
    page = output / "index.html"
    name = Path(image).name if isinstance(image, str | Path) else "an image"
    sources = [
        str(source) if isinstance(source, str | Path) else explainer.name
        for source, explainer in zip(_listed(models), explainers, strict=True)
    ]
    options = ["--checkpoint", str(checkpoint)] if checkpoint is not None else []
    options += ["--data", "FOLDER"] if data is not None else []
    command = _command(name if isinstance(image, str | Path) else "IMAGE", sources, options, position)
    write_text(page, _render(name, explanations, position, sections, command))
    return ExplainResult(page, files, explanations, statistics)


def _listed(models: Any) -> list[Any]:
    return list(models) if isinstance(models, list | tuple) else [models]


def _load(models: Any, checkpoint: str | Path | None, device: str | None) -> list[Explainer]:
    sources = _listed(models)
    if not sources:
        raise ValueError("explain needs at least one model")
    loaded = []
    for number, source in enumerate(sources):
        weights = checkpoint if number == 0 else None
        loaded.append(source if isinstance(source, Explainer) else load_explainer(source, weights, device))
    for number, explainer in enumerate(loaded):
        if explainer.name in [other.name for other in loaded[:number]]:
            explainer.name = f"{explainer.name} ({number + 1})"
    return loaded


def _items(
    explanations: Sequence[Explanation], position: tuple[float, float], layer: int | str | None
) -> Iterator[Item]:
    """Figures of one image, those that compare models first."""
    index = None if layer is None else explanations[0].layer_for("mixing_row", layer).layer.index
    able = {key: [e for e in explanations if key in e.questions()] for key in QUESTIONS}
    heading = "The same questions to every model" if len(explanations) > 1 else "One token"
    text = (
        "What the marked token depends on in the image, how much each token contributes to it in one block, and which"
        " patches raise (purple) or lower (orange) the score of the predicted class."
    )
    yield Item(
        "overview", heading, text, "", "", partial(_themed, figures.draw_comparison, explanations, position, index)
    )
    yield _item(
        "mixing_rows", "mixing_row", partial(_themed, figures.draw_maps, explanations, "mixing_row", None, position)
    )
    yield Item(
        "depth",
        "By depth",
        "How far each block mixes, and what becomes of the tokens: their similarity and the number of dimensions they"
        " use." + (" Dots are heads." if len(explanations) == 1 else ""),
        AMIXER,
        "AMixer, supplement, figure 1",
        partial(_themed, figures.draw_curves, explanations),
    )
    for explanation in explanations:
        chosen = explanation.layer_for("mixing_row", index)
        heads = count_heads(chosen)
        if heads > 1:
            some = (explanation,), "mixing_row", [chosen.layer.index], position, range(min(heads, MAX_HEADS))
            yield Item(
                f"heads_{_slug(explanation)}",
                f"Heads of {explanation.name}",
                f"Mixing weights of the marked token for each head of {chosen.layer.label}.",
                *("", ""),
                partial(_themed, figures.draw_maps, *some),
            )
    if norms := able["query_key_norms"]:
        yield _item("norms", "query_key_norms", partial(_themed, figures.draw_maps, norms, "query_key_norms"))
    if able["rollout"]:
        yield _item(
            "rollout", "rollout", partial(_themed, figures.draw_maps, able["rollout"], "rollout", None, position)
        )
    for e in able["sampled_positions"]:
        yield _item(
            f"samples_{_slug(e)}", "sampled_positions", partial(_themed, figures.draw_samples, e, None, position)
        )
    for e in able["super_token_regions"]:
        draw = partial(_themed, figures.draw_super_tokens, e, position)
        yield _item(f"super_tokens_{_slug(e)}", "super_token_regions", draw)
    for e in able["weight_bank"]:
        yield _item(f"bank_{_slug(e)}", "weight_bank", partial(_themed, figures.draw_bank, e))


def _statistics_items(statistics: dict[str, Statistics]) -> Iterator[Item]:
    """Figures of a folder of images."""
    if not statistics:
        return
    images = f"{next(iter(statistics.values())).images:,} images"
    for name, values in statistics.items():
        if any(layer.across is not None for layer in values.layers):
            yield Item(
                f"offsets_{_slug(name)}",
                f"Offsets of {name}",
                f"How far the middle token of each block samples, over {images}. The axis is the possible range; the"
                " spread is the standard deviation as a part of it.",
                ATM,
                "ATMNet, figures 3, 6 and 7",
                partial(_themed, figures.draw_offsets, values),
            )
    softmax = {n: s for n, s in statistics.items() if any(x.entropies is not None for x in s.layers)}
    if softmax:
        text = f"How spread out the attention of all tokens and heads is in each block, over {images}."
        draw = partial(_themed, figures.draw_entropies, softmax)
        yield Item("entropies", "Attention entropy", text, CB, "context broadcasting, section 3", draw)
    text = f"Mean mixing distance over {images}: a dot for each head, or for the mixer if it has none."
    for name, values in statistics.items():
        draw = partial(_themed, figures.draw_distances, values)
        yield Item(
            f"distances_{_slug(name)}", f"Mixing distance of {name}", text, AMIXER, "AMixer, supplement, figure 1", draw
        )


def _themed(function: Callable[..., Any], *args: Any) -> Any:
    *arguments, theme = args
    return function(*arguments, theme=theme)


def _item(name: str, question: str, draw: Draw) -> Item:
    asked = QUESTIONS[question]
    source = f"paper, {asked.figure}" if asked.figure else "paper"
    return Item(name, asked.title, asked.sentence, asked.link, source, draw)


def _slug(model: Explanation | str) -> str:
    name = model if isinstance(model, str) else model.name
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def _render(
    name: str,
    explanations: Sequence[Explanation],
    position: tuple[float, float],
    sections: Sequence[Section],
    command: str,
) -> str:
    facts = {}
    for explanation in explanations:
        if explanation.classes:
            best = explanation.classes[explanation.target].split(",")[0]
            facts[explanation.name] = f"{best} {100 * float(explanation.probabilities.max()):.0f} %"
    height, width = explanations[0].rgb.shape[:2]
    facts |= {"image": f"{width}x{height} px", "token": f"{position[0]:g}, {position[1]:g}"}
    lead = (
        "A vision network cuts an image into patches, the tokens, and a token mixer lets them exchange information."
        f" This page shows what {'these networks do' if len(explanations) > 1 else explanations[0].name + ' does'} with"
        f" {name}."
    )
    title = "What the mixers see" if len(explanations) > 1 else f"What {explanations[0].name} sees"
    return render_page(title, lead, facts, sections, command)


def _command(image: str, sources: Sequence[str], options: Sequence[str], position: tuple[float, float]) -> str:
    """The command that makes the page, without the folders of images: the page is sent to others."""
    first, *others = sources
    compared = ["--compare", ",".join(others)] if others else []
    token = f"{position[0]:g},{position[1]:g}"
    return shlex.join(["tokamix", "explain", image, "--model", first, *compared, *options, "--token", token])
