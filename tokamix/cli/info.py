"""`tokamix info`: what this machine can run, and whether a data set can be used."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from tokamix.cli._shared import console, plain_errors

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
CHECKED = 1000  # images of each split that `--data` decodes
SHOWN = 10  # unreadable images that `--data` names


def info(
    data: Annotated[str | None, typer.Option(help="Check this data set, given as for `tokamix train`.")] = None,
    task: Annotated[
        Literal["classify", "segment", "detect"], typer.Option(help="The task that --data is meant for.")
    ] = "classify",
) -> None:
    """Show versions, CPU, GPU, kernels, extras and the data folder; with --data, check a data set."""
    with plain_errors():
        if data is not None:
            _check_data(data, task)
            return
        table = Table(box=None, show_header=False)
        for name, value in _rows():
            table.add_row(name, escape(value))
        console.print(table)


def _rows() -> list[tuple[str, str]]:
    import torch

    import tokamix
    from tokamix.ops import dispatch

    rows = [("tokamix", f"{tokamix.__version__}, {len(tokamix.list_models())} models")]
    rows.append(("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"))
    rows += [(package, version(package)) for package in ("torch", "torchvision", "timm")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows.append(("CPU", f"{usable} of {os.cpu_count()} cores usable, {torch.get_num_threads()} torch threads"))
    rows.append(("CPU features", _cpu_features(torch.backends.cpu.get_cpu_capability())))
    gpu = torch.cuda.is_available()
    if gpu:
        rows += [(f"GPU {i}", _gpu(torch.cuda.get_device_properties(i))) for i in range(torch.cuda.device_count())]
    else:
        built = torch.version.cuda or torch.version.hip
        rows.append(("GPU", f"none: {'no device was found' if built else 'this torch is built for the CPU only'}"))
    rows.append(("triton", version("triton") if dispatch.HAS_TRITON else "not installed: operators run eagerly"))
    probe = torch.empty(0, device="cuda" if gpu else "cpu")
    rows.append(("kernels", _kernels(dispatch.why_not(probe), dispatch.forced())))
    rows.append(("data folder", _data_folder()))
    extras = _extras()
    if extras is None:
        rows.append(("extras", "not known: tokamix runs from a source tree and is not installed"))
    for extra, packages in sorted((extras or {}).items()):
        missing = [package for package in packages if not _is_installed(package)]
        hint = f"missing {', '.join(missing)}: pip install 'tokamix[{extra}]'" if missing else "installed"
        rows.append((f"extra {extra}", hint))
    return rows


def _cpu_features(capability: str) -> str:
    """Instruction sets that decide about speed, and the one that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith("flags")), "").split()
    except OSError:  # not Linux
        flags = []
    features = [flag for flag in CPU_FEATURES if flag in flags]
    return f"{', '.join(features)}; torch uses {capability}" if features else f"torch uses {capability}"


def _gpu(properties: Any) -> str:
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"


def _kernels(reason: str | None, forced: str | None) -> str:
    """Whether operators run as Triton kernels, or why not."""
    if forced == "eager":
        return "not used: TOKAMIX_BACKEND=eager"
    if forced == "triton":
        return f"TOKAMIX_BACKEND=triton, but {reason}: operators raise errors" if reason else "always used, or an error"
    return f"not used: {reason}" if reason else "used for float16, bfloat16 and float32"


def _data_folder() -> str:
    """The folder of downloaded data sets, and whether it can be used."""
    from tokamix.data.images.torchvision import data_folder

    folder = data_folder()
    source = "TOKAMIX_DATA" if os.environ.get("TOKAMIX_DATA") else "default; set TOKAMIX_DATA to change it"
    if not folder.exists():
        state = "does not exist yet"
    elif not folder.is_dir():
        state = "is not a folder"
    else:
        state = "writable" if os.access(folder, os.W_OK) else "readable only: nothing can be downloaded into it"
    return f"{folder} ({source}): {state}"


def _check_data(source: str, task: Literal["classify", "segment", "detect"]) -> None:
    """Print the size of each split and its unreadable images; exit with 1 if there is one."""
    import tokamix

    dataset = tokamix.create_dataset(source, task)
    print(f"{dataset.name}: {len(dataset.classes)} classes, for the task {task}")
    problems: list[str] = []
    for name, split in (("train", dataset.train), ("val", dataset.val)):
        labels = getattr(split, "labels", None)
        present = f", {len(set(labels.tolist()))} classes present" if labels is not None else ""
        indices = range(0, len(split), max(1, -(-len(split) // CHECKED))) if hasattr(split, "name_of") else ()
        earlier = len(problems)
        for i in indices:
            try:
                split[i] if labels is not None else split.sample(i)
            except ValueError as error:  # decoding errors name the file
                problems.append(str(error))
        bad = len(problems) - earlier
        decoded = f"{bad:,} of {len(indices):,} cannot be decoded" if bad else f"{len(indices):,} of them decoded"
        print(f"  {name}: {len(split):,} images{present}; {decoded}")
    if problems:
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        raise ValueError("\n".join([*problems[:SHOWN], *more]))
    if not len(dataset.train):
        print("there are no training images: the data is for evaluation only")
    elif not len(dataset.val):
        print("there are no validation images, which training needs")
    else:
        print("no problem found")


def _extras() -> dict[str, list[str]] | None:
    """The packages of each extra, from the distribution's metadata; None if tokamix is not installed."""
    extras: dict[str, list[str]] = {}
    try:
        requirements = requires("tokamix") or []
    except PackageNotFoundError:
        return None
    for line in requirements:
        requirement, _, marker = line.partition(";")
        if "extra ==" in marker and "tokamix[" not in requirement:
            extra = marker.split("extra ==")[1].strip(" '\"")
            name = re.match(r"[\w.-]+", requirement)  # before extras and versions: mkdocstrings[python]<2,>=1
            extras.setdefault(extra, []).append(name[0] if name else requirement.strip())
    return extras


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
