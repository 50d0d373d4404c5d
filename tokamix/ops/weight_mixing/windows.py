"""Addresses of a window's tokens in the map; maps are neither rolled nor cut."""

import triton
import triton.language as tl


@triton.jit
def locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W: tl.constexpr, WIN_H: tl.constexpr):
    """Tokens o_n of window i_w: their index in the map, and the side of its borders from which the shift moved them."""
    columns = width // WIN_W
    y = (i_w // columns) * WIN_H + o_n // WIN_W
    x = (i_w % columns) * WIN_W + o_n % WIN_W
    side = tl.where(y >= height - shift_y, 2, 0) + tl.where(x >= width - shift_x, 1, 0)
    y = tl.where(y + shift_y >= height, y + shift_y - height, y + shift_y)
    x = tl.where(x + shift_x >= width, x + shift_x - width, x + shift_x)
    return y * width + x, side
