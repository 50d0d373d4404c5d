"""Sweep over timm: which models `swap_mixer` and context broadcasting cover, as docs/swap_coverage.md.

Every model is run once on the meta device, and each module that evaluates a softmax is noted: this does not use the
library's own search for attentions. A name is covered if all these modules have an adapter, or are kept for a reason
that the report names, and at least one has an adapter. `python docs/_scripts/swap.py rows.jsonl` adds a row for each
name that the file lacks, so an interrupted sweep goes on (about 25 minutes), then writes the page and
tests/swap/coverage.json. With `--run` each name is also swapped to SimA and run on the meta device.
"""

import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import model_entrypoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tokamix
from tokamix.swap.inspect import ADAPTERS, KEPT, class_path, find_attentions, nominal_size

ROOT = Path(__file__).parents[2]
PAGE, RECORD = ROOT / "docs" / "swap_coverage.md", ROOT / "tests" / "swap" / "coverage.json"
# files without attention: one name of each is enough
PLAIN = {
    *(
        "convmixer",
        "convnext",
        "cspnet",
        "densenet",
        "dla",
        "dpn",
        "efficientnet",
        "focalnet",
        "ghostnet",
        "hardcorenas",
    ),
    *(
        "hgnet",
        "hrnet",
        "inception_next",
        "inception_resnet_v2",
        "inception_v3",
        "inception_v4",
        "mambaout",
        "mlp_mixer",
    ),
    *(
        "nasnet",
        "pnasnet",
        "rdnet",
        "regnet",
        "repghost",
        "repvgg",
        "res2net",
        "resnest",
        "resnet",
        "resnetv2",
        "rexnet",
    ),
    *("selecsls", "senet", "sknet", "starnet", "tresnet", "vgg", "vovnet", "xception"),
}


class FindSoftmax(TorchDispatchMode):
    """Notes the class of the innermost module that evaluates each softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack: list[nn.Module] = [model]
        self.found: Counter[str] = Counter()
        for module in model.modules():
            if module is not model:
                module.register_forward_pre_hook(lambda module, _: self.stack.append(module))
                module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "softmax" in name or "scaled_dot_product" in name:
            owner = next(module for module in reversed(self.stack) if not isinstance(module, nn.Softmax))
            self.found[class_path(type(owner))] += 1
        return func(*args, **(kwargs or {}))


def trace(name: str, run: bool = False) -> dict[str, Any]:
    """The classes that evaluate a softmax in one model, and whether the swapped model runs."""
    row: dict[str, Any] = {"name": name, "file": model_entrypoint(name).__module__.rpartition(".")[2]}
    model = timm.create_model(name, device="meta").eval()
    image = torch.empty(1, *model.pretrained_cfg.get("input_size", (3, 224, 224)), device="meta")
    mode = FindSoftmax(model)
    try:
        with torch.no_grad(), mode:
            model(image)
    except RuntimeError as error:  # gemma4_vit looks at values, which do not exist here: its attentions by their class
        row["error"] = str(error).splitlines()[0]
        mode.found.update(class_path(type(module)) for module, _ in find_attentions(model)[0].values())
    row["found"] = dict(mode.found)
    if run and mode.found:
        model = timm.create_model(name, device="meta").eval()
        report = tokamix.swap_mixer(model, "sima")
        left = tokamix.count_exp(model, nominal_size(model))["softmax"]
        row["run"] = "ok" if not left or report.kept else f"{left} softmax evaluations are left"
    return row


def problem(row: dict[str, Any]) -> str:
    """Why a model is not covered; empty if it is."""
    found = row["found"]
    if missing := [name for name in found if name not in ADAPTERS and name not in KEPT]:
        return f"{missing[0].rpartition('.')[2]} has no adapter"
    if not any(name in ADAPTERS for name in found):
        return "; ".join(sorted({f"{name.rpartition('.')[2]} {KEPT[name]}" for name in found}))
    return "" if row.get("run", "ok") == "ok" else row["run"]


def page(rows: list[dict[str, Any]], everything: int) -> str:
    """The table of files, and the exceptions."""
    covered = [row for row in rows if not problem(row)]
    lines = [
        "# Models that can be swapped",
        "",
        f"Written by `python docs/_scripts/swap.py` on {date.today()} with timm {timm.__version__}. Of {everything}"
        f" names, {len(rows)} evaluate a softmax in a token mixer or pooling; `tokamix.swap_mixer(model, 'sima')`"
        f" replaces it in **{len(covered)}** of them. Every model was run once on the meta device to find the modules"
        " that evaluate a softmax, and each of their classes has an adapter; `tests/swap/test_attentions.py` compares"
        " the adapters with the hosts' own forwards. This says what can be swapped, not how accurate the result is.",
        "",
        "| file of timm | modules with softmax | names | swapped |",
        "|---|---|---:|---:|",
    ]
    for file in sorted({row["file"] for row in rows}):
        own = [row for row in rows if row["file"] == file]
        classes = ", ".join(sorted({name.rpartition(".")[2] for row in own for name in row["found"]}))
        lines.append(f"| {file} | {classes} | {len(own)} | {sum(not problem(row) for row in own)} |")
    lines += ["", "## Not swapped", "", "| names | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if reason := problem(row):
            reasons.setdefault(reason, []).append(row["name"])
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in reasons.items()]
    lines += ["", "## Kept in swapped models", "", "| module | names | reason |", "|---|---:|---|"]
    kept = Counter(name for row in covered for name in row["found"] if name in KEPT)
    lines += [f"| {name.removeprefix('timm.')} | {count} | {KEPT[name]} |" for name, count in kept.items()]
    return "\n".join(lines) + "\n"


def main(path: Path, run: bool) -> None:
    """Add the missing rows, then write the page and the record."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done, files = {row["name"] for row in rows}, {row["file"] for row in rows}
    names = [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("timm.")]
    with path.open("a") as output:
        for name in names:
            file = model_entrypoint(name).__module__.rpartition(".")[2]
            if name not in done and not (file in PLAIN and file in files):
                rows.append(trace(name, run))
                files.add(file)
                print(json.dumps(rows[-1]), file=output, flush=True)
    rows = [row for row in rows if row["found"]]
    PAGE.write_text(page(rows, len(names)))
    covered = sum(not problem(row) for row in rows)
    groups = Counter(" ".join(sorted(row["found"])) for row in rows)  # names with the same classes of modules
    record = {"timm": timm.__version__, "names": len(rows), "swapped": covered, "groups": dict(sorted(groups.items()))}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{covered} of {len(rows)} names")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--run" in sys.argv)
