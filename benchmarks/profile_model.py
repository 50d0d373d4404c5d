"""Where a compiled model's GPU time goes: python benchmarks/profile_model.py NAME [infer|train] [SIZE] [BATCH]."""

import sys

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import tokamix
from tokamix.bench.suites import OURS

STEPS = 5


def main() -> None:
    name, mode, size, batch = (sys.argv[1:] + ["infer", "224", "128"][len(sys.argv) - 2 :])[:4]
    kwargs = dict(OURS).get(name, {})
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
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"{name} {mode} {size} px, batch {batch}: {total / STEPS / 1e3:.2f} ms of GPU time a step")
    for event in events[:30]:
        share, calls = event.self_device_time_total / total, event.count // STEPS
        print(f"{share:6.1%} {event.self_device_time_total / STEPS / 1e3:8.3f} ms {calls:5d}x  {event.key[:110]}")


if __name__ == "__main__":
    main()
