"""Profile a compiled model on a GPU: python benchmarks/profile_model.py NAME [infer|train] [SIZE] [BATCH]."""

import sys

import torch
import torch.nn.functional as F

import tokamix
from tokamix.bench.suites import LARGE, OURS
from tokamix.bench.timing import print_costs

STEPS = 5


def main() -> None:
    name, mode, size, batch = (sys.argv[1:] + ["infer", "224", "128"][len(sys.argv) - 2 :])[:4]
    kwargs = dict(OURS).get(name, {}) | {option: int(size) for option in dict(LARGE).get(name, {})}  # img_size, if any
    model = tokamix.create_model(name, **kwargs).cuda()
    images = torch.randn(int(batch), 3, int(size), int(size), device="cuda")
    if mode == "infer":
        model, images = model.eval().bfloat16(), images.bfloat16()
    compiled = torch.compile(model)

    def step() -> None:
        if mode == "infer":
            with torch.inference_mode():
                compiled(images)
            return
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(images), torch.zeros(len(images), dtype=torch.long, device="cuda"))
        loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    print(f"{name} {mode} {size} px, batch {batch}, a step:")
    print_costs(step, "cuda", STEPS, rows=30)


if __name__ == "__main__":
    main()
