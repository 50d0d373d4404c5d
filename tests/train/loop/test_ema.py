"""The exponential moving average of the weights."""

import torch
from torch import nn

from tokamix.train.loop.ema import Ema


def test_a_shared_layer_gets_its_weights_back() -> None:
    """A layer that the model has twice, as CoaT has, is averaged and swapped once."""
    layer = nn.BatchNorm1d(3)
    model = nn.Sequential(layer, nn.Linear(3, 3), layer)
    ema = Ema(model, 0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    layer.num_batches_tracked += 5
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ema.update(100)
    average = {name: tensor.clone() for name, tensor in ema.average.items()}
    assert average.keys() == weights.keys()
    torch.testing.assert_close(average["0.weight"], weights["0.weight"] - 0.9)
    for _ in range(2):
        with ema.swapped():
            torch.testing.assert_close(dict(model.state_dict()), average, rtol=0, atol=0)
        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
        torch.testing.assert_close(ema.average, average, rtol=0, atol=0)
