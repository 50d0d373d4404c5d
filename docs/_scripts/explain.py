"""Draw the pictures of docs/guides/explain.md with the shipped weights.

python docs/_scripts/explain.py --images FOLDER   # photos for the statistics; the docs show Imagenette's validation set

The photo is china.jpg of scikit-learn, by danielbuechele, CC BY 2.0.
"""

import argparse
from pathlib import Path

import sklearn.datasets
import torch
from PIL import Image

from tokamix.explain import collect_statistics, figures, load_explainer

DOCS = Path(__file__).parents[1]
PHOTO = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"
MIXERS = ("softmax", "sima", "active_token", "super_token", "weight_mixing")
POSITION = (0.42, 0.45)


def save(figure, name: str) -> None:
    """A small PNG: 256 colours are enough for heat maps."""
    (path,) = figures.save_figure(figure, DOCS / f"explain_{name}")
    Image.open(path).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT).save(path, optimize=True)
    print(path, path.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder of photos; without it, no statistics are drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [*(f"pyramid_nano_{mixer}.imagenette" for mixer in MIXERS), "pyramid_nano_softmax.cb_imagenette"]
    explainers = {name.removeprefix("pyramid_nano_"): load_explainer(name, device="cpu") for name in names}
    seen = {name: explainer(PHOTO) for name, explainer in explainers.items()}
    sima, softmax = seen["sima.imagenette"], seen["softmax.imagenette"]
    save(figures.draw_comparison(list(seen.values()), POSITION), "comparison")
    save(figures.draw_curves(list(seen.values())), "depth")
    save(figures.draw_super_tokens(seen["super_token.imagenette"], POSITION), "super_tokens")
    save(figures.draw_samples(seen["active_token.imagenette"], None, POSITION), "samples")
    save(figures.draw_maps([sima, softmax], "query_key_norms"), "norms")
    save(figures.draw_bank(seen["weight_mixing.imagenette"]), "bank")
    if options.images is not None:
        save(figures.draw_offsets(collect_statistics(explainers["active_token.imagenette"], options.images)), "offsets")
        both = ("softmax.imagenette", "softmax.cb_imagenette")
        save(figures.draw_entropies({n: collect_statistics(explainers[n], options.images) for n in both}), "entropies")


if __name__ == "__main__":
    main()
