"""The demo: a comparison of softmax attention and five other mixers on handwritten digits."""

from collections.abc import Callable
from pathlib import Path

from tokamix.compare.candidate import Candidate
from tokamix.compare.report import Texts
from tokamix.compare.run import Comparison, run_comparison
from tokamix.recipes import Recipe, load_recipe

BODY = "columnar_tiny"
EXAMPLE_CLASS = "2"  # the digit whose receptive fields are shown
QUICK = {"epochs": 1, "warmup_epochs": 0, "batch_size": 256, "model_kwargs.dim": 16}
CANDIDATES = (
    Candidate(
        "softmax",
        "Softmax attention",
        "softmax",
        "every token weighs every other by the softmax of their dot products",
        "https://arxiv.org/abs/1706.03762",
    ),
    Candidate(
        "softmax_cb",
        "Context broadcasting",
        "softmax",
        "softmax attention; every token also moves half way to the average token",
        "https://arxiv.org/abs/2210.08457",
        context_broadcast="cb",
    ),
    Candidate(
        "sima",
        "SimA",
        "sima",
        "attention with l1-normalised queries and keys, no softmax",
        "https://arxiv.org/abs/2206.08898",
    ),
    Candidate(
        "active_token",
        "Active tokens",
        "active_token",
        "every channel takes a token that it selects along its row and its column",
        "https://arxiv.org/abs/2203.06108",
    ),
    Candidate(
        "super_token",
        "Super tokens",
        "super_token",
        "tokens are grouped into a few super tokens that attend to each other",
        "https://arxiv.org/abs/2211.11167",
    ),
    Candidate(
        "weight_mixing",
        "Weight mixing",
        "weight_mixing",
        "weights composed from a learned bank, no query-key product",
        "https://doi.org/10.1007/978-3-031-19803-8_4",
    ),
)
TEXTS = Texts(
    title="One small network, six token mixers",
    lead=(
        "A vision network cuts an image into patches, the tokens, and a token mixer lets them exchange information."
        " This page compares mixers: the same network learnt to read handwritten digits six times on your machine, and"
        " only the mixer changed."
    ),
    scaling=(
        "In this body weight mixing covers the whole image, and a super token stands for four tokens; the papers'"
        " pyramids have windows and larger cells."
    ),
    limits=(
        "Digits is a toy data set of 8×8 pixel scans. It shows that every mixer learns and what it costs, not which one"  # noqa: RUF001
        " is best for photographs.",
        "All mixers had the same body, recipe and number of epochs; none was tuned on its own. Body and recipe were"
        " chosen while looking at these validation images, with softmax first, so the accuracies are slightly too good."
        " The papers' own networks are built around their mixers; `tokamix models` lists them.",
        "Latency and training time are those of a very small network on this machine. The benchmarks show the speed of"
        " the papers' networks on a GPU.",
    ),
)


def create_recipe(candidate: Candidate, seed: int, quick: bool = False) -> Recipe:
    """The recipe `digits` with the candidate's mixer; everything else is the same for all."""
    changes = {
        "model": f"{BODY}_{candidate.mixer}",
        "model_kwargs.context_broadcast": candidate.context_broadcast,
        "seed": seed,
    }
    return load_recipe("digits", {**changes, **(QUICK if quick else {})})


def run_demo(
    output: str | Path = "runs/demo",
    seeds: int = 1,
    quick: bool = False,
    resume: bool = True,
    progress: Callable[[str], object] = print,
    processes: int | None = None,
) -> Comparison:
    """Train all candidates on digits on the CPU, each on one core, and write the page.

    Args:
        output: folder for the runs and the page.
        seeds: trainings of each mixer, all on the same split of the data.
        quick: a narrower network for one epoch, to see that everything works.
        resume: continue the demo in `output`; finished runs are not trained again.
        progress: called with a line for each finished training.
        processes: trainings that run at the same time; default: the number of torch threads.
    """
    return run_comparison(
        CANDIDATES,
        lambda candidate, seed: create_recipe(candidate, seed, quick),
        "digits",
        Path(output),
        TEXTS,
        seeds=range(seeds),
        resume=resume,
        device="cpu",
        processes=processes,
        progress=progress,
        example_class=EXAMPLE_CLASS,
    )
