"""`tokamix info`: versions, devices, kernels and extras."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version

from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def info() -> None:
    """Say what can run here, and why not."""
    import torch

    import tokamix
    from tokamix.ops import dispatch

    table = Table(box=None, show_header=False)
    table.add_row("tokamix", f"{tokamix.__version__}, {len(tokamix.list_models())} models")
    table.add_row("python", platform.python_version())
    for package in ("torch", "torchvision", "timm"):
        table.add_row(package, version(package))
    if torch.cuda.is_available():
        table.add_row("GPU", torch.cuda.get_device_name())
    else:
        built = torch.version.cuda or torch.version.hip
        table.add_row("GPU", f"none: {'no device was found' if built else 'this torch is built for the CPU alone'}")
    table.add_row("triton", version("triton") if dispatch.HAS_TRITON else "not installed: operators run eagerly")
    probe = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    with plain_errors():
        table.add_row("kernels", _kernels_used(dispatch.why_not(probe), dispatch.forced()))
    for extra, packages in sorted(_extras().items()):
        missing = [p for p in packages if not _installed(p)]
        hint = f"missing {', '.join(missing)}: pip install 'tokamix\\[{extra}]'" if missing else "installed"
        table.add_row(f"extra {extra}", hint)
    console.print(table)


def _kernels_used(reason: str | None, forced: str | None) -> str:
    if forced == "eager":
        return "not used: TOKAMIX_BACKEND=eager"
    if forced == "triton":
        return f"TOKAMIX_BACKEND=triton, but {reason}: operators raise errors" if reason else "always used, or an error"
    return f"not used: {reason}" if reason else "used for float16, bfloat16 and float32"


def _extras() -> dict[str, list[str]]:
    """The packages of each extra, as declared by the distribution itself."""
    extras: dict[str, list[str]] = {}
    for line in requires("tokamix") or []:
        requirement, _, marker = line.partition(";")
        if "extra ==" in marker and "tokamix[" not in requirement:
            extra = marker.split("extra ==")[1].strip(" '\"")
            extras.setdefault(extra, []).append(requirement.split("=")[0].split(">")[0].strip())
    return extras


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
