"""Predictions on images: classes, masks, boxes."""

from tokamix.predict.predictor import (
    Prediction,
    Predictor,
    class_map,
    draw,
    find_pictures,
    load_predictor,
    predict,
    read_picture,
)

__all__ = [
    "Prediction",
    "Predictor",
    "class_map",
    "draw",
    "find_pictures",
    "load_predictor",
    "predict",
    "read_picture",
]
