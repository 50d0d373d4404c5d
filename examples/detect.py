"""Train a detector with masks, evaluate it, and draw a prediction. Your own data: COCO's annotation files."""

import numpy as np
from PIL import Image

import tokamix
from tokamix.predict import load_predictor

result = tokamix.train(
    "test_resnet",  # the backbone: any model of timm or tokamix
    "shapes:64",  # generated images with boxes and masks
    "shapes_detect",
    "runs/detect",
    overrides={"iterations": 4, "eval_every": 4, "warmup_iterations": 1},
    quiet=True,
)
print(f"{result.metric} {result.score:.1f} %")

image = tokamix.create_dataset("shapes:64", task="detect").val.sample(0).image  # (3, H, W) uint8
Image.fromarray(np.asarray(image.permute(1, 2, 0))).save("image.png")
predictor = load_predictor("runs/detect", score_threshold=0.05)
prediction = predictor("image.png")
print(prediction.names)
predictor.draw("image.png", prediction).save("detections.png")
