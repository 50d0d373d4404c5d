"""How quickly `tokamix studio` answers, and whether its memory grows.

python -m benchmarks.studio clicks              # milliseconds of a click, by model and picture
python -m benchmarks.studio memory --count 500  # requests over HTTP; resident memory and files before and after

A click is what happens between the request and the HTML of all pictures, with a photo that the model has seen.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

import httpx
import psutil
import torch

from tokamix.studio import StudioSettings, start_studio
from tokamix.studio.look import Look
from tokamix.studio.view import DEFAULT_MODELS, View

MIXERS = ("softmax", "sima", "active_token", "super_token", "weight_mixing")
PICTURES = ("mixing_row", "sampled_positions", "super_token_regions", "query_key_norms")
POSITIONS = [(0.05 + 0.9 * i / 19, 0.05 + 0.9 * (7 * i % 20) / 19) for i in range(20)]


def measure_clicks(look: Look, view: View) -> tuple[float, float, float]:
    """Median and largest milliseconds on the clock, and median of processor time."""
    look.draw(view)
    clock, processor = [], []
    for y, x in POSITIONS:
        start, used = time.perf_counter(), time.process_time()
        look.draw(dataclasses.replace(view, y=y, x=x))
        clock.append(1e3 * (time.perf_counter() - start))
        processor.append(1e3 * (time.process_time() - used))
    return statistics.median(clock), max(clock), statistics.median(processor)


def clicks() -> None:
    names = {mixer: f"pyramid_nano_{mixer}.imagenette" for mixer in MIXERS}
    cases: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        (mixer, (name,), PICTURES) for mixer, name in names.items()
    ]
    cases += [(f"{mixer}, receptive field", (name,), ("receptive_field",)) for mixer, name in names.items()]
    cases += [("three models", DEFAULT_MODELS, PICTURES), ("three models, default", DEFAULT_MODELS, View().pictures)]
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'median':>8}{'largest':>9}{'processor':>11}  ms")
    for name, models, pictures in cases:
        look = Look(StudioSettings(device="cpu"))  # remembers nothing of the case before
        median, largest, processor = measure_clicks(look, View("temple", models, pictures))
        print(f"{name:34}{median:8.0f}{largest:9.0f}{processor:11.0f}", flush=True)


def memory(count: int) -> None:
    app = start_studio(StudioSettings(port=0, device="cpu"))
    number = next(n for n, entry in app.fns.items() if entry.name == "draw")
    process, folder = psutil.Process(), Path(os.environ["GRADIO_TEMP_DIR"])
    durations = []
    with httpx.Client(base_url=app.local_url, timeout=600) as client:
        for request in range(count + 1):
            if request % max(count // 10, 1) == 0:
                used, files = process.memory_info().rss / 2**20, sum(path.is_file() for path in folder.rglob("*"))
                print(f"{request:5} requests  {used:7.1f} MB  {files} files", flush=True)
            y, x = POSITIONS[request % 20]
            data = [None, list(DEFAULT_MODELS), list(PICTURES), request % 9, 0, y, x]
            session = f"user{request}"
            start = time.perf_counter()
            body = {"data": data, "fn_index": number, "session_hash": session}
            client.post("/gradio_api/queue/join", json=body).raise_for_status()
            with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
                messages = (json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:"))
                assert next(m for m in messages if m["msg"] == "process_completed")["success"]
            durations.append(1e3 * (time.perf_counter() - start))
    print(f"median {statistics.median(durations):.0f} ms, largest {max(durations):.0f} ms")
    app.close(verbose=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clicks", "memory"))
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    clicks() if options.what == "clicks" else memory(options.count)


if __name__ == "__main__":
    main()
