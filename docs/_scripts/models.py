"""Write the tables of docs/models.md from the registered models: python docs/_scripts/models.py."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm

import tokamix
from tokamix.models._registry import sizes

PAGE = Path(__file__).parents[1] / "models.md"
GROUPS = {
    "ATMNet": "atmnet_*",
    "STViT": "stvit_*",
    "AMixer": "amixer_*",
    "SimA: XCiT, DeiT and CvT without softmax": "*_sima*",
    "Context broadcasting": "*_cb*",
    "Hosts that timm lacks": "",
}
GRID = ".bodies"


def groups() -> Iterator[tuple[str, list[str]]]:
    """A title and its models; every model outside the comparison grid is in exactly one group."""
    left = [name for name in tokamix.list_models() if not in_grid(name)]
    for title, pattern in GROUPS.items():
        matching = set(tokamix.list_models(pattern))
        chosen = [name for name in left if name in matching]
        left = [name for name in left if name not in matching]
        yield title, sorted(chosen, key=lambda name: (family(name), sizes(name)[0]))
    assert not left


def in_grid(name: str) -> bool:
    return timm.models.model_entrypoint(name).__module__.endswith(GRID)


def family(name: str) -> str:
    return name.split("_")[0] + ("_p8" if "_p8_" in name else "")


def config(name: str) -> Any:
    return timm.models.get_pretrained_cfg(name)


def paper(name: str) -> str:
    """The paper's title with a link to it."""
    kind, _, number = str(config(name).paper_ids or "").partition(":")
    address = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}.get(kind)
    return f"[{config(name).paper_name}]({address}{number})" if address else ""


def row(name: str) -> str:
    parameters, macs = sizes(name)
    top1 = next((note.removeprefix("top1=") for note in config(name).notes or () if note.startswith("top1=")), "")
    return f"| `{name}` | {parameters / 1e6:.2f} | {macs / 1e9:.2f} | {top1} |"


def tables() -> str:
    parts = []
    for title, names in groups():
        papers = "; ".join(dict.fromkeys(map(paper, names)))
        head = "| model | parameters (M) | GMACs | top-1 printed |\n|---|--:|--:|--:|"
        parts.append("\n".join([f"### {title}\n", f"{papers}\n", head, *map(row, names)]))
    grid = [name for name in tokamix.list_models() if in_grid(name)]
    bodies = sorted({"_".join(name.split("_")[:2]) for name in grid})
    head = f"| mixer | {' | '.join(f'`{body}`' for body in bodies)} |\n|---|{'--:|' * len(bodies)}"
    mixers = sorted({name.removeprefix(body + "_") for body in bodies for name in grid if name.startswith(body + "_")})
    lines = []
    for mixer in mixers:
        cells = [sizes(f"{body}_{mixer}") for body in bodies]
        lines.append(f"| `{mixer}` | {' | '.join(f'{p / 1e6:.2f} M, {m / 1e9:.2f} G' for p, m in cells)} |")
    parts.append("\n".join(["### The comparison grid\n", GRID_TEXT, head, *lines]))
    return "\n\n".join(parts)


GRID_TEXT = (
    "One body, many mixers: every pair is a model name, such as `pyramid_tiny_sima`."
    " Parameters and MACs of each pair:\n"
)


def fill(page: str) -> str:
    """The page with the tables between its two marks written anew."""
    before, start, rest = page.partition("<!-- models -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise ValueError("the page has no <!-- models --> and <!-- end -->")
    return f"{before}{start}\n{tables()}\n\n{end}{after}"


if __name__ == "__main__":
    current = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if fill(current) == current else "docs/models.md is out of date: python docs/_scripts/models.py")
    PAGE.write_text(fill(current))
