"""`tokamix export`: write a trained model for a runtime."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tokamix.cli._shared import console, plain_errors


def export(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint file, a pretrained timm model, or hf-hub:user/name.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: the model's name, in this folder.")
    ] = None,
    to: Annotated[
        Literal["onnx", "openvino", "torch-export", "aoti", "executorch"], typer.Option(help="Format of the file.")
    ] = "onnx",
    size: Annotated[
        str | None, typer.Option(help="224, 192x256 or dynamic. Default: a classifier's own, otherwise dynamic.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Images of one call, or dynamic. Default: 1; dynamic with --size dynamic.")
    ] = None,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        typer.Option(help="Type of weights and activations; int8 needs --data."),
    ] = "fp32",
    preprocessing: Annotated[
        bool, typer.Option(help="The file takes uint8 images (B, H, W, 3) and returns classes as well.")
    ] = False,
    features: Annotated[bool, typer.Option(help="Export feature maps instead of logits.")] = False,
    opset: Annotated[int, typer.Option(help="Version of the ONNX operators.")] = 20,
    data: Annotated[
        str | None, typer.Option(help="Data set that int8 is calibrated on and measured with, as for `tokamix train`.")
    ] = None,
    keep_layers: Annotated[
        int | None, typer.Option(min=0, help="Sensitive layers that int8 leaves in fp32. Default: as few as needed.")
    ] = None,
    max_drop: Annotated[float, typer.Option(min=0, help="Points of top-1 that int8 may lose.")] = 0.5,
    attention: Annotated[
        bool, typer.Option("--int8-attention", help="Use int8 for the products of attention in ONNX files, too.")
    ] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="That --to aoti compiles for.")] = "cpu",
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="SOURCE is a model name, exported with random weights to try its speed.")
    ] = False,
    triton: Annotated[
        bool, typer.Option("--triton", help="Write config.pbtxt for Triton; -o is then REPOSITORY/NAME/1/model.onnx.")
    ] = False,
    runner: Annotated[
        bool, typer.Option("--runner", help="Copy run_onnx.py beside the file: prediction without PyTorch.")
    ] = False,
) -> None:
    """Export a model to ONNX, OpenVINO, torch.export, AOTInductor or ExecuTorch.

    The file is run in its runtime and compared with PyTorch at several sizes and batches; if it differs, it is not
    written. `tokamix predict FILE IMAGES` uses it.
    """
    with plain_errors():
        shape, count = _size(size), _batch(batch)
        for option, given in (("--runner", runner), ("--triton", triton)):
            if given and to != "onnx":
                raise ValueError(f"{option} is for ONNX files, got --to {to}")
        from tokamix.export import export as run

        if triton:
            from tokamix.export.triton import check_triton_path

            check_triton_path(output or Path("model.onnx"))
        if untrained and model is not None:
            raise ValueError("--model is for a checkpoint file; with --untrained, SOURCE names the architecture")
        network: Any = source
        if untrained:
            from tokamix.models import create_model

            network = create_model(source).eval()
            output = output or Path(f"{source}{_suffix(to)}")
        report = run(
            network,
            output,
            to=to,
            size=shape,
            batch=count,
            precision=precision,
            preprocessing=preprocessing,
            features=features,
            opset=opset,
            model=model,
            data=data,
            keep_layers=keep_layers,
            max_drop=max_drop,
            attention=attention,
            device=device,
        )
        for line in report.lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if triton:
            from tokamix.export.triton import write_triton_config

            console.print(f"{write_triton_config(report.path)}: for Triton Inference Server", highlight=False)
        if runner:
            from tokamix.export import light
            from tokamix.files import write_text

            script = report.path.with_name("run_onnx.py")
            write_text(script, Path(light.__file__).read_text())
            console.print(f"{script}: python {script.name} {report.path.name} IMAGES", highlight=False, markup=False)


def _suffix(to: str) -> str:
    from tokamix.export.write import SUFFIX

    return SUFFIX[to]


def _size(text: str | None) -> Any:
    if text is None or text == "dynamic":
        return text
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"--size is {text!r}, but must be a side such as 224, a size such as 192x256, or dynamic")
    return (int(sides[0]), int(sides[-1]))


def _batch(text: str | None) -> Any:
    if text is None or text == "dynamic":
        return text
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--batch is {text!r}, but must be a number from 1 on, or dynamic")
    return int(text)
