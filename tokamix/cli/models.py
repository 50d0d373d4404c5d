"""`tokamix models`: the list of models."""

from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from tokamix.cli._shared import console


def models(
    pattern: Annotated[str, typer.Argument(help="a part of the name, or a shell pattern")] = "",
    grid: Annotated[bool, typer.Option(help="also the comparison grid, bodies x mixers")] = False,
) -> None:
    """List the models: parameters, MACs at 224 px, paper, and the accuracy the paper prints."""
    import timm

    import tokamix
    from tokamix.models._registry import sizes

    names = tokamix.list_models(pattern)
    if not (grid or pattern):
        names = [name for name in names if not timm.models.model_entrypoint(name).__module__.endswith(".bodies")]
    if not names:
        console.print(f"no model matches {pattern!r}; `tokamix models` lists them all")
        raise typer.Exit(1)
    caption = "GMACs at 224 px; top-1 on ImageNet as the paper prints it"
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
        table.add_row(name, f"{params / 1e6:.2f}", f"{macs / 1e9:.2f}", top1, (cfg.paper_name or "").partition(":")[0])
    console.print(table)
