"""Processes of a study's runs: several share a GPU, under NVIDIA's multi-process service where it works."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokamix._openmp import limit_spinning

ROOT = Path(__file__).resolve().parents[2]
MPS = Path(tempfile.gettempdir()) / f"tokamix_mps_{os.getuid()}"
Process = subprocess.Popen[bytes]


def environment(runs: Path, mps: bool, threads: int | None = 2) -> dict[str, str]:
    """Environment of a run's process: shared caches of compiled code, few threads, MPS.

    With None for `threads` each run chooses.
    """
    cache = (runs / "cache").resolve()
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    env |= {"TORCHINDUCTOR_COMPILE_THREADS": "4", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    env |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    if threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(threads))
    limit_spinning(env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if mps:
        env |= {"CUDA_MPS_PIPE_DIRECTORY": str(MPS), "CUDA_MPS_LOG_DIRECTORY": str(MPS)}
    return env


def start_mps(runs: Path) -> str | None:
    """Start NVIDIA's multi-process service; returns why it cannot be used, or None."""
    env = environment(runs, mps=True)
    MPS.mkdir(exist_ok=True)
    script = "import torch; x = torch.ones(64, 64, device='cuda'); assert (x @ x).sum().item() == 64**3"
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, timeout=20, check=False)  # may run already
        subprocess.run([sys.executable, "-c", script], env=env, timeout=60, check=True)
        options: Any = {"input": b"get_server_list\n", "stdout": subprocess.PIPE, "timeout": 10, "check": True}
        servers = subprocess.run(["nvidia-cuda-mps-control"], env=env, **options).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if servers else "it has no server"


def stop_mps(runs: Path) -> None:
    """Stop the service."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-cuda-mps-control"]
        subprocess.run(command, input=b"quit\n", env=environment(runs, mps=True), timeout=20, check=False)


def start_process(
    module: str, arguments: list[str], log: Path, runs: Path, mps: bool, threads: int | None = 2
) -> Process:
    """Start `python -m module ...`; its output goes to `log`, its input comes from `send`."""
    with log.open("wb") as file:
        options: Any = {"stdin": subprocess.PIPE, "stdout": file, "stderr": file, "start_new_session": True}
        env = environment(runs, mps, threads)
        return subprocess.Popen([sys.executable, "-m", module, *arguments], env=env, **options)


def send(process: Process, line: str | None) -> None:
    """Write a line to a process; None ends its input, after which it exits. One that has died is noticed elsewhere."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        if line is None:
            process.stdin.close()
        else:
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()


def stop_processes(processes: list[Process], seconds: float = 20) -> None:
    """Stop runs and their children; gently first: a run saves its state, and MPS fails if a client dies in a kernel."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
