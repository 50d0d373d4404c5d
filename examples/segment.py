"""Train a segmenter, evaluate it, and draw a prediction. Your own data: a folder with images/ and masks/."""

import numpy as np
from PIL import Image

import tokamix
from tokamix.predict import load_predictor

result = tokamix.train(
    "test_resnet",  # the backbone: any model of timm or tokamix
    "shapes:64",  # generated images with a class for each pixel
    "shapes_segment",
    "runs/segment",
    overrides={"iterations": 4, "eval_every": 4, "warmup_iterations": 1, "crop_size": 64},
    quiet=True,
)
print(f"mean IoU {result.score:.1f} %")

image = tokamix.create_dataset("shapes:64", task="segment").val.sample(0).image  # (3, H, W) uint8
Image.fromarray(np.asarray(image.permute(1, 2, 0))).save("image.png")
predictor = load_predictor("runs/segment")
prediction = predictor("image.png")
predictor.draw("image.png", prediction).save("segmentation.png")
