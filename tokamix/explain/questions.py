"""The questions that can be asked about a captured image, each with a title, a sentence, a link and a function.

`Explanation.ask` answers them with named arrays; the command, the page and the studio show what is in `QUESTIONS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.explain import active_token, attention, depth, mixing, receptive_field, saliency, sima, super_token
from tokamix.explain.capture import CapturedLayer, Pair
from tokamix.explain.weight_mixing import weight_bank

if TYPE_CHECKING:
    from tokamix.explain.explainer import Explanation

SIMA = "https://arxiv.org/abs/2206.08898"
ATM = "https://arxiv.org/abs/2203.06108"
STVIT = "https://arxiv.org/abs/2211.11167"
AMIXER = "https://doi.org/10.1007/978-3-031-19803-8_4"
CB = "https://arxiv.org/abs/2210.08457"
FIELD_PROBES = 4  # directions from which receptive fields are estimated: follows a pointer; correlation with all 0.93
SALIENCY_PX = 4  # side of the patches over which the saliency is summed
BANK_ENTRIES = 6  # entries of a weight bank that are shown, as in the paper


class Values(NamedTuple):
    """What a question's function returns: panels of numbers and their names."""

    values: Tensor  # (panels, H, W), or (panels, layers) of a curve
    panels: tuple[str, ...]
    unit: str = ""


class Target(NamedTuple):
    """What a question is asked about."""

    explanation: "Explanation"
    layer: CapturedLayer
    token: Pair
    head: int | None

    def heads(self, values: Tensor) -> Tensor:
        """Values (1, heads, ...) of all images -> those of the chosen head, or the mean over heads (...)."""
        if self.head is None or values.shape[1] == 1:
            return values[0].mean(0)
        if not 0 <= self.head < values.shape[1]:
            raise ValueError(f"{self.layer.layer.name} has no head {self.head}: it has {values.shape[1]}, from 0")
        return values[0, self.head]


@dataclass(frozen=True)
class Question:
    """A question, and how it is answered.

    Attributes:
        title: a few words.
        sentence: what the picture shows, for people who see it for the first time.
        link: the paper.
        figure: the paper's figure, in words.
        style: how values are drawn: "heat" (from 0), "root" (from 0, square root), "range" (from the least to the
            largest), "signed" (around 0), "regions" (numbers of regions), "curve" (by layer).
        uses: which of "layer", "token" and "head" change the answer.
        applies: whether a layer can be asked.
        answer: the function.
    """

    title: str
    sentence: str
    link: str
    figure: str
    style: str
    uses: tuple[str, ...]
    applies: Callable[[CapturedLayer], bool]
    answer: Callable[[Target], Values]


@dataclass(frozen=True)
class Answer:
    """Named arrays with all that is needed to draw them.

    Attributes:
        question: key of `QUESTIONS`.
        values: float32 (panels, H, W); of a curve (panels, layers), NaN where a layer has no value.
        panels: name of each panel or line.
        style: how to draw the values; see `Question`.
        unit: of the values, or "".
        layer: name of the mixer's module; None if the answer is about the whole network.
        grid: (H, W) of that layer's tokens.
        token: (row, column) in that grid; None if the answer does not depend on it.
        head: index of the head; None: mean over heads.
    """

    question: str
    values: np.ndarray
    panels: tuple[str, ...]
    style: str
    unit: str = ""
    layer: str | None = None
    grid: Pair | None = None
    token: Pair | None = None
    head: int | None = None

    @property
    def over_image(self) -> bool:
        """Whether the values belong to places of the image; those of a weight bank belong to displacements."""
        return self.style != "curve" and self.question != "weight_bank"


def _always(layer: CapturedLayer) -> bool:
    return True


def _kinds(*kinds: str) -> Callable[[CapturedLayer], bool]:
    return lambda layer: layer.layer.kind in kinds


def _has_cells(layer: CapturedLayer) -> bool:
    return layer.layer.kind == "super_token" and layer.mixer.cell != (1, 1)


def _has_super_attention(layer: CapturedLayer) -> bool:
    return _has_cells(layer) and hasattr(layer.mixer.refine, "qkv")


def _has_offsets(layer: CapturedLayer) -> bool:
    return layer.layer.kind == "active_token" and layer.mixer.offsets != "zero"


def _has_bank(layer: CapturedLayer) -> bool:
    return layer.layer.kind == "weight_mixing" and layer.mixer.bank.ndim == 2


def _one(values: Tensor, unit: str = "") -> Values:
    return Values(values[None], ("",), unit)


def _mixing_row(target: Target) -> Values:
    return _one(target.heads(mixing.mixing_row(target.layer, target.token)))


def _receptive_field(target: Target) -> Values:
    view = target.explanation
    field = receptive_field.layer_receptive_field(view.model, view.image, target.layer, target.token, FIELD_PROBES)
    return _one(field)


def _saliency(target: Target) -> Values:
    view = target.explanation
    pixels = saliency.integrated_gradients(view.model, view.image, view.target).sum(0)
    grid = (-(-pixels.shape[0] // SALIENCY_PX), -(-pixels.shape[1] // SALIENCY_PX))  # pixels are noise to the eye
    return _one(F.adaptive_avg_pool2d(pixels[None], grid)[0] * (pixels.numel() / (grid[0] * grid[1])))


def _sampled_positions(target: Target) -> Values:
    counts = active_token.sampled_positions(target.layer, target.token)[0]
    return Values(counts, ("horizontal", "vertical") if len(counts) == 2 else ("joint",), "of samples")


def _own_super_token(target: Target) -> Pair:
    """The super token that the chosen token is most associated with."""
    number = int(super_token.super_token_regions(target.layer)[0, target.token[0], target.token[1]])
    columns = super_token.super_token_grid(target.layer)[1]
    return number // columns, number % columns


def _regions(target: Target) -> Values:
    return _one(super_token.super_token_regions(target.layer)[0])


def _association(target: Target) -> Values:
    return _one(super_token.super_token_association(target.layer, _own_super_token(target))[0])


def _super_attention(target: Target) -> Values:
    return _one(target.heads(super_token.super_token_attention(target.layer, _own_super_token(target))))


def _bank(target: Target) -> Values:
    bank = weight_bank(target.layer)
    shown = bank[:BANK_ENTRIES]
    return Values(torch.cat([shown, bank.mean(0, keepdim=True)]), (*(str(i + 1) for i in range(len(shown))), "mean"))


def _norms(target: Target) -> Values:
    maps = []
    for norm in sima.query_key_norms(target.layer):
        chosen = target.heads(norm) if target.head is not None else norm[0].square().sum(0).sqrt()
        area = target.layer.grid[0] * target.layer.grid[1]  # keys of a smaller map stand for several tokens
        maps.append(attention.on_grid(target.layer, chosen * (chosen.shape[-1] - target.layer.prefix) / area))
    return Values(torch.stack(maps), ("queries", "keys"))


def _rollout(target: Target) -> Values:
    view = target.explanation
    last = view.capture[-1]
    y, x = ((n + 0.5) / size for n, size in zip(target.token, target.layer.grid, strict=True))
    return _one(attention.rollout(view.capture)[0, last.index_of(last.token_at(y, x))])


def _by_layer(target: Target, function: Callable[[CapturedLayer], Tensor], unit: str) -> Values:
    """One line for the mean and one for each head; layers with fewer heads have NaN."""
    rows = [function(layer).flatten().float().cpu() for layer in target.explanation.capture]
    heads = max(map(len, rows))
    table = torch.full((len(rows), 1 + heads), torch.nan)
    for line, row in zip(table, rows, strict=True):
        line[0] = row.mean()
        line[1 : 1 + len(row)] = row
    single = all(len(row) == 1 for row in rows)
    names = ("mean",) if single else ("mean", *(f"head {i + 1}" for i in range(heads)))
    return Values(table[:, : len(names)].T, names, unit)


def _entropy(layer: CapturedLayer) -> Tensor:
    if layer.layer.kind != "softmax":
        return torch.tensor([torch.nan])
    return attention.attention_entropy(layer)[0].mean(-1)


def _distances(target: Target) -> Values:
    return _by_layer(target, lambda layer: mixing.mixing_distance(layer)[0], "px")


def _patches(layer: CapturedLayer) -> Tensor:
    return layer.tokens[:, layer.prefix :]


ANY_LAYER: dict[str, Any] = {"uses": ("layer", "token", "head"), "applies": _always}
NETWORK: dict[str, Any] = {"uses": (), "applies": _always, "style": "curve"}
QUESTIONS: dict[str, Question] = {
    "mixing_row": Question(
        "Mixing weights of one token",
        "How much each token contributes to the marked one: the mixer's own weights, or for mixers without weights the"
        " norm of the derivative.",
        "https://arxiv.org/abs/1706.03762",
        "",
        style="signed",
        answer=_mixing_row,
        **ANY_LAYER,
    ),
    "receptive_field": Question(
        "Effective receptive field",
        "How strongly the marked token, after this block, depends on each pixel of the image.",
        "https://arxiv.org/abs/1701.04128",
        "",
        style="root",
        uses=("layer", "token"),
        applies=_always,
        answer=_receptive_field,
    ),
    "saliency": Question(
        "Saliency of the predicted class",
        "How much each patch of 4x4 pixels raises (purple) or lowers (orange) the score of the predicted class, by"
        " integrated gradients.",
        "https://arxiv.org/abs/1703.01365",
        "",
        style="signed",
        uses=(),
        applies=_always,
        answer=_saliency,
    ),
    "sampled_positions": Question(
        "Sampled tokens",
        "Where the marked token's channels sample: along its row and along its column, the stronger the more often.",
        ATM,
        "figure 5",
        style="heat",
        uses=("layer", "token"),
        applies=_has_offsets,
        answer=_sampled_positions,
    ),
    "super_token_regions": Question(
        "Super tokens",
        "Regions of tokens that belong most to the same super token.",
        STVIT,
        "",
        style="regions",
        uses=("layer",),
        applies=_has_cells,
        answer=_regions,
    ),
    "super_token_association": Question(
        "Soft association",
        "How strongly each token belongs to the super token of the marked token.",
        STVIT,
        "",
        style="heat",
        uses=("layer", "token"),
        applies=_has_cells,
        answer=_association,
    ),
    "super_token_attention": Question(
        "Attention among super tokens",
        "What the marked token's super token attends to, mapped back to the image.",
        STVIT,
        "",
        style="heat",
        uses=("layer", "token", "head"),
        applies=_has_super_attention,
        answer=_super_attention,
    ),
    "weight_bank": Question(
        "Weight bank",
        "Entries of the bank from which mixing weights are composed, by displacement of the source: no displacement is"
        " in the middle.",
        AMIXER,
        "figure 2 of the supplement",
        style="signed",
        uses=("layer",),
        applies=_has_bank,
        answer=_bank,
    ),
    "query_key_norms": Question(
        "Norms of queries and keys",
        "The length of each token's query and key, divided by the l1 norm over the tokens as SimA does: SimA's are long"
        " where the image is important.",
        SIMA,
        "figures 3 and 4",
        style="range",
        uses=("layer", "head"),
        applies=_kinds("sima", "softmax"),
        answer=_norms,
    ),
    "rollout": Question(
        "Attention rollout",
        "What reaches the marked token of the last layer through the attention of all layers.",
        "https://arxiv.org/abs/2005.00928",
        "",
        style="heat",
        uses=("token",),
        applies=_kinds("softmax"),
        answer=_rollout,
    ),
    "mixing_distance": Question(
        "Mean mixing distance",
        "How far away the mixed tokens are on average, by layer; thin lines are heads.",
        AMIXER,
        "figure 1 of the supplement",
        answer=_distances,
        **NETWORK,
    ),
    "attention_entropy": Question(
        "Attention entropy",
        "How spread out the attention is, by layer: the logarithm of the number of tokens if uniform, 0 if on one.",
        CB,
        "",
        answer=lambda target: _by_layer(target, _entropy, "nats"),
        **{**NETWORK, "applies": _kinds("softmax")},
    ),
    "token_similarity": Question(
        "Similarity of tokens",
        "Mean cosine similarity of the tokens after each block: near 1, they have become alike (oversmoothing).",
        "https://arxiv.org/abs/2104.12753",
        "",
        answer=lambda target: _by_layer(target, lambda layer: depth.token_similarity(_patches(layer)), ""),
        **NETWORK,
    ),
    "effective_rank": Question(
        "Effective rank of the tokens",
        "Number of dimensions that the tokens after each block really use.",
        "https://arxiv.org/abs/2103.03404",
        "",
        answer=lambda target: _by_layer(target, lambda layer: depth.effective_rank(_patches(layer)), ""),
        **NETWORK,
    ),
}
