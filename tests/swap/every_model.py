"""Swapped models of all files of timm: another image size, torch.compile without graph breaks, torch.export.

`make test-swap`, about five minutes of one core; tests/swap/test_models.py does it for a few files.
"""

import pytest

from tests.swap.test_models import MODELS, check_sizes_compile_and_export


@pytest.mark.parametrize("file", MODELS)
def test_a_swapped_model_can_what_its_host_can(file: str, record_property) -> None:
    for action, done in check_sizes_compile_and_export(file).items():
        record_property(action, done)
