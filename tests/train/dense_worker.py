"""Trains tiny segmenters and detectors; torchrun starts it. `python -m tests.train.dense_worker '[{...}, ...]'`"""

import json
import sys
from pathlib import Path

import torch

from tests.train.tiny_dense import run

if __name__ == "__main__":
    torch.set_num_threads(1)
    for settings in json.loads(sys.argv[1]):
        run(settings.pop("task"), Path(settings.pop("output")), **settings)
