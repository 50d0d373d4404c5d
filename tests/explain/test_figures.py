"""Figures against golden images, by perceptual hash; `python -m tests.explain.test_figures` writes them again."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.explain.models import pyramid
from tokamix.explain import Explainer, Explanation, Statistics, capture, figures
from tokamix.explain.page import Section, render_page
from tokamix.inference import InferenceConfig

GOLDEN = Path(__file__).parent / "golden"
SIDE = 16  # the hash has SIDE x SIDE bits
TOLERANCE = 0.05  # part of the bits that may differ


def photo() -> np.ndarray:
    """A bright disc on a slope."""
    y, x = np.mgrid[0:32, 0:32]
    image = np.stack([8 * y, 8 * x, 128 + 0 * x], -1).astype(np.uint8)
    image[(y - 12) ** 2 + (x - 20) ** 2 < 50] = (250, 240, 200)
    return image


def explanation(mixer: str, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> Explanation:
    torch.manual_seed(0)
    model = pyramid(mixer, mixer_kwargs={"cell": 2} if mixer == "super_token" else None).float()
    config = InferenceConfig.from_model(model, classes, image_size=32, crop_pct=1.0)
    return Explainer(model, config, mixer)(photo())


def statistics(mixer: str, seed: int = 0) -> Statistics:
    torch.manual_seed(seed)
    result = Statistics()
    result.update(capture(pyramid(mixer).float(), torch.randn(4, 3, 32, 32)))
    return result


FIGURES = {
    "comparison": lambda: figures.draw_comparison([explanation("softmax"), explanation("sima")], (0.4, 0.6)),
    "curves": lambda: figures.draw_curves([explanation("softmax"), explanation("pooling")]),
    "norms": lambda: figures.draw_maps([explanation("sima")], "query_key_norms"),
    "heads_dark": lambda: figures.draw_maps(
        [explanation("softmax")], "mixing_row", [1], (0.4, 0.6), (0, 1), theme="dark"
    ),
    "samples": lambda: figures.draw_samples(explanation("active_token"), None, (0.4, 0.6)),
    "super_tokens": lambda: figures.draw_super_tokens(explanation("super_token"), (0.4, 0.6)),
    "bank_dark": lambda: figures.draw_bank(explanation("weight_mixing"), theme="dark"),
    "offsets": lambda: figures.draw_offsets(statistics("active_token")),
    "entropies": lambda: figures.draw_entropies({"a": statistics("softmax"), "b": statistics("softmax", 1)}),
    "distances": lambda: figures.draw_distances(statistics("weight_mixing")),
}


def render(name: str) -> Image.Image:
    file = io.BytesIO()
    FIGURES[name]().savefig(file, format="png", dpi=60)
    return Image.open(file).convert("RGB")


def perceptual_hash(image: Image.Image) -> np.ndarray:
    """Whether each cell of a coarse grid is brighter than the one to its left, for each colour channel."""
    small = np.asarray(image.resize((SIDE + 1, SIDE), Image.Resampling.BOX), dtype=int)
    return small[:, 1:] > small[:, :-1] + 2  # flat paper has no order


def difference(a: Image.Image, b: Image.Image) -> float:
    return float((perceptual_hash(a) != perceptual_hash(b)).mean())


@pytest.mark.parametrize("name", FIGURES)
def test_golden_images(name: str) -> None:
    golden = Image.open(GOLDEN / f"{name}.png").convert("RGB")
    drawn = render(name)
    assert drawn.size == golden.size
    assert difference(drawn, golden) <= TOLERANCE


def test_the_hash_tells_figures_apart() -> None:
    images = {name: Image.open(GOLDEN / f"{name}.png").convert("RGB") for name in FIGURES}
    pairs = [(a, b) for a in images for b in images if a < b]
    assert all(difference(images[a], images[b]) > 2 * TOLERANCE for a, b in pairs)
    changed = images["samples"].copy()  # one panel of three lost
    changed.paste(images["samples"].getpixel((0, 0)), (0, 0, changed.width // 3, changed.height))
    assert difference(changed, images["samples"]) > TOLERANCE


def test_formats(tmp_path) -> None:
    figure = figures.draw_curves([explanation("pooling")])
    written = figures.save_figure(figure, tmp_path / "new" / "a.b", ("png", "svg", "pdf"))
    assert [path.name for path in written] == ["a.b.png", "a.b.svg", "a.b.pdf"]
    assert written[0].read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in written[1].read_bytes()[:800]
    assert written[2].read_bytes()[:4] == b"%PDF"
    with pytest.raises(ValueError, match="figures are written as png, svg, pdf, not as 'gif'"):
        figures.save_figure(figure, tmp_path / "a", ("gif",))


def test_names_of_classes_are_no_formulas(tmp_path: Path) -> None:
    figure = figures.draw_comparison([explanation("pooling", ("$100_$50",) * 3)])
    assert figures.save_figure(figure, tmp_path / "overview")[0].stat().st_size > 0


def test_the_page_is_self_contained_and_escaped() -> None:
    light, dark = (figures.draw_curves([explanation("pooling")], theme=theme) for theme in ("light", "dark"))
    section = Section("<b>", 'a "text"', "https://example.org/?a=1&b=2", "paper", light, dark)
    page = render_page("<script>", "lead", {"fact": "<i>"}, [section], "tokamix explain")
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<b>" not in page
    assert 'alt="a &quot;text&quot;"' in page
    assert page.count("data:image/svg+xml;base64,") == 2
    assert page.count("http") == 1  # the link; nothing is loaded
    assert "$" not in page


def test_names_without_what_they_share() -> None:
    tags = ("softmax.imagenette", "sima.imagenette", "softmax.cb_imagenette")
    assert figures._strip_common([f"pyramid_nano_{tag}" for tag in tags]) == ["softmax", "sima", "softmax.cb"]
    assert figures._strip_common(["a_b.c", "a_b.d_c"]) == ["b", "b.d"]  # every name keeps a word
    assert figures._strip_common(["a_b_c"]) == ["a_b_c"]
    assert figures._strip_common(["runs/one", "runs/two"]) == ["one", "two"]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="there is no theme 'blue': choose one of light, dark"):
        figures.draw_curves([explanation("pooling")], theme="blue")
    with pytest.raises(ValueError, match="no layer has sampling offsets"):
        figures.draw_offsets(statistics("softmax"))
    with pytest.raises(ValueError, match="no model has softmax attention"):
        figures.draw_entropies({"a": statistics("sima")})
    with pytest.raises(ValueError, match="pooling has no weight banks"):
        figures.draw_bank(explanation("pooling"))
    with pytest.raises(ValueError, match="pooling has no super tokens"):
        figures.draw_super_tokens(explanation("pooling"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for figure_name in FIGURES:
        render(figure_name).save(GOLDEN / f"{figure_name}.png", optimize=True)
