"""Check the papers' qualitative findings on the shipped weights, and write them with numbers to results/explain.csv.

python benchmarks/explain_findings.py --images imagenette_96px_val.npz --voc voc_seg_256px.zip

Rows of finished models are kept; delete the file to measure again.

- ATMNet, figures 3, 6, 7: learned offsets widen with depth. Spread of the middle token's offsets by layer.
- Context broadcasting: CB lowers the attention entropy. Mean entropy by layer with and without CB.
- AMixer, supplement, figure 1: the mean mixing distance grows with depth. All five mixers.
- SimA, figures 3, 4: norms of SimA's queries and keys highlight the object, softmax's are flat. Foreground masks of
  Pascal VOC: the most highlighted pixels, as many as the mask has, and their IoU with it; the area under the ROC curve;
  and the coefficient of variation of the norms, which is 0 for a flat map.
"""

import argparse
import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tokamix.explain import Explainer, Statistics, capture, load_explainer
from tokamix.explain.sima import query_key_norms

MIXERS = ("softmax", "sima", "weight_mixing", "super_token", "active_token")
COLUMNS = ("finding", "model", "layer", "quantity", "value", "standard_error", "images")
BATCH = 20


def read_npz(path: Path, count: int) -> list[Image.Image]:
    """Images spread evenly over a pack of (blob, offsets)."""
    pack = np.load(path)
    offsets, blob = pack["offsets"], pack["blob"]
    chosen = np.linspace(0, len(offsets) - 2, count).astype(int)
    return [Image.open(io.BytesIO(blob[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in chosen]


def read_voc(path: Path) -> Iterator[tuple[Image.Image, Tensor]]:
    """Validation photos and masks (H, W): 1 an object, 0 background, -1 ignored."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.read("val.txt").decode().split():
            image = Image.open(io.BytesIO(archive.read(f"images/{name}.webp"))).convert("RGB")
            classes = np.array(Image.open(io.BytesIO(archive.read(f"masks/{name}.png"))))
            yield image, torch.from_numpy(np.where(classes == 255, -1, classes > 0).astype(int))


def batches(explainer: Explainer, images: list[Image.Image]) -> Iterator[Tensor]:
    yield from torch.stack([explainer.preprocess(image) for image in images]).split(BATCH)


def depth_rows(name: str, images: list[Image.Image]) -> Iterator[tuple]:
    explainer = load_explainer(name, device="cpu")
    statistics = Statistics()
    for batch in batches(explainer, images):
        statistics.update(capture(explainer.model, batch))
    for layer in statistics.layers:
        place = (name, layer.layer.label)
        yield "distance by depth", *place, "mean mixing distance, px", float(layer.distance.mean()), "", len(images)
        if layer.across is not None:
            spread = float(np.mean(layer.offset_spread))
            tokens = spread * layer.grid[1]
            yield "offsets by depth", *place, "spread, part of the range", spread, "", len(images)
            yield "offsets by depth", *place, "spread, tokens", tokens, "", len(images)
            px = tokens * explainer.config.image_size / layer.grid[1]
            yield "offsets by depth", *place, "spread, px", px, "", len(images)
        if layer.entropies is not None:
            part = float(layer.entropy.mean()) / layer.highest
            yield "entropy with and without CB", *place, "entropy / uniform", part, "", len(images)


def overlap(score: Tensor, mask: Tensor) -> tuple[float, float]:
    """IoU of the highest scores, as many as the mask has pixels, and area under the ROC curve."""
    known = mask >= 0
    score, inside = score[known], mask[known] == 1
    count = int(inside.sum())
    top = torch.zeros_like(inside)
    top[score.topk(count).indices] = True
    iou = float((top & inside).sum() / (top | inside).sum())
    ranks = score.argsort().argsort().double() + 1
    pairs = count * (len(score) - count)
    return iou, float((ranks[inside].sum() - count * (count + 1) / 2) / pairs)


def norm_rows(voc: Path) -> Iterator[tuple]:
    networks = {m: load_explainer(f"pyramid_nano_{m}.imagenette", device="cpu") for m in ("sima", "softmax")}
    values: dict[tuple[str, str, str], list[float]] = {}
    for image, full in read_voc(voc):
        explainer = networks["sima"]
        side = explainer.config.image_size
        square = image.resize((side, side), Image.Resampling.BICUBIC)  # the whole photo, as in training
        mask = F.interpolate(full[None, None].float(), (side, side), mode="nearest")[0, 0].long()
        if not 0.02 < float((mask == 1).float().mean()) < 0.9:
            continue
        pixels = explainer.preprocess(square)[None]
        y, x = (torch.linspace(-1, 1, side) for _ in range(2))
        scores = {("centre of the photo", ""): -(y[:, None] ** 2 + x**2), ("chance", ""): torch.rand(side, side)}
        for name, network in networks.items():
            result = capture(network.model, pixels)
            for layer in (result[0], result[5], result[-1]):
                for normalise in (True, False) if name == "softmax" else (True,):
                    for part, norm in zip("QK", query_key_norms(layer, normalise), strict=True):
                        token = norm[0].square().sum(0).sqrt()
                        grid = token.unflatten(0, layer.grid)[None, None]
                        large = F.interpolate(grid, (side, side), mode="bilinear")[0, 0]
                        label = f"{name} |{part}{'^' if normalise else ''}|"
                        scores[label, layer.layer.label] = large
                        spread = float(token.std() / token.mean())
                        values.setdefault((label, layer.layer.label, "coefficient of variation"), []).append(spread)
        for (label, place), score in scores.items():
            iou, area = overlap(score, mask)
            values.setdefault((label, place, "IoU at the mask's area"), []).append(iou)
            values.setdefault((label, place, "area under the ROC curve"), []).append(area)
    for (label, place, quantity), numbers in sorted(values.items()):
        error = float(np.std(numbers, ddof=1) / len(numbers) ** 0.5)
        yield "norms and objects (VOC)", label, place, quantity, float(np.mean(numbers)), error, len(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="imagenette_96px_val.npz")
    parser.add_argument("--voc", type=Path, required=True, help="voc_seg_256px.zip")
    parser.add_argument("--count", type=int, default=200, help="images for statistics by depth")
    parser.add_argument("--output", type=Path, default=Path("results/explain.csv"))
    options = parser.parse_args()
    torch.manual_seed(0)
    done = set()
    if options.output.exists():
        with options.output.open(newline="") as file:
            done = {row["model"] for row in csv.DictReader(file)}
    with options.output.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(COLUMNS)

        def write(rows: list[tuple]) -> None:  # all rows of a model at once: a killed run resumes with the next model
            writer.writerows([[f"{v:.4g}" if isinstance(v, float) else v for v in row] for row in rows])
            file.flush()

        if "chance" not in done:
            write(list(norm_rows(options.voc)))
        images = read_npz(options.images, options.count)
        names = [f"pyramid_nano_{mixer}.imagenette" for mixer in MIXERS]
        for name in ("pyramid_nano_softmax.cb_imagenette", *names):
            if name not in done:
                write(list(depth_rows(name, images)))


if __name__ == "__main__":
    main()
