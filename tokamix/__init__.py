"""Vision token mixers from five papers, inside timm."""

from importlib.metadata import version

__version__ = version("tokamix")
