"""Predictions on images: classes, masks and boxes."""

from tokamix.predict.predictor import Prediction, Predictor, draw_prediction, load_predictor, predict

__all__ = ["Prediction", "Predictor", "draw_prediction", "load_predictor", "predict"]
