"""`tokamix models`: the list of models."""

from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def models(
    pattern: Annotated[
        str, typer.Argument(help="Part of a name, a shell pattern such as 'stvit_*', or the tag of shipped weights.")
    ] = "",
    grid: Annotated[bool, typer.Option("--grid", help="Include the comparison grid: every body x mixer.")] = False,
) -> None:
    """List the models: parameters, MACs at 224 px, paper, and the accuracy reported in the paper.

    For weights that come with the package, such as pyramid_nano_sima.imagenette, show their model card.
    """
    with plain_errors():
        import timm

        import tokamix
        from tokamix.models._registry import sizes
        from tokamix.models.shipped import model_card, shipped_weights

        if pattern in shipped_weights():
            console.print(model_card(pattern), markup=False, highlight=False, soft_wrap=True)
            return

        matching = tokamix.list_models(pattern)
        if not matching:
            raise ValueError(f"no model matches {pattern!r}; `tokamix models` lists all of them")
        names = matching
        if not (grid or pattern):
            names = [n for n in matching if not timm.models.model_entrypoint(n).__module__.endswith(".bodies")]
        caption = "GMACs at 224 px; ImageNet top-1 as reported in the paper"
        table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
        table.add_column("model", no_wrap=True)
        for title in ("params (M)", "GMACs", "top-1"):
            table.add_column(title, justify="right", no_wrap=True)
        width = max(12, console.width - max(map(len, names)) - 32)
        table.add_column("paper", no_wrap=True, overflow="ellipsis", max_width=width)
        for name in track(names, "counting", console=console, transient=True):
            params, macs = sizes(name)
            cfg = timm.models.get_pretrained_cfg(name)
            top1 = next((n.removeprefix("top1=") for n in cfg.notes or () if n.startswith("top1=")), "")
            paper = (cfg.paper_name or "").partition(":")[0]
            table.add_row(name, f"{params / 1e6:.2f}", f"{macs / 1e9:.2f}", top1, paper)
        console.print(table)
        if hidden := len(matching) - len(names):
            console.print(
                f"{len(names)} models; {hidden} more combine a body with a mixer: `tokamix models --grid` lists them"
            )
