"""Swapped models of all files of timm: another image size, torch.compile without graph breaks, torch.export.

`make test-swap`, several minutes; tests/swap/test_models.py does it for a few files. With timm 1.0.31, 11 of the 52
hosts have one image size only; all 52 swapped models compile and export.
"""

import pytest

from tests.swap.test_models import MODELS, check_sizes_compile_and_export


@pytest.mark.parametrize("file", MODELS)
def test_a_swapped_model_can_what_its_host_can(file: str) -> None:
    check_sizes_compile_and_export(file)
