"""Training processes of the studio: one at a time, stopped with it, their errors as sentences."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokamix.studio.jobs import Jobs
from tokamix.train import child

# stands for `tokamix train`: writes the file that is named, prints lines, saves on SIGTERM
RUN = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def stop(number, frame):
    (folder / "saved").write_text("")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
print("line 1", flush=True)
(folder / "begun").write_text("")
for number in range(2, 600):
    time.sleep(0.1)
    print("line", number, flush=True)
"""


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs((sys.executable, "-c", RUN))
    yield made
    made.close()


def test_start_and_stop(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run of this studio"):
        jobs.stop()
    assert jobs.log() == ""
    jobs.start([str(tmp_path)], (tmp_path / "begun").exists)
    assert jobs.is_running()
    with pytest.raises(ValueError, match="one run at a time"):
        jobs.start([str(tmp_path)], (tmp_path / "begun").exists)
    first = jobs.log()
    time.sleep(0.3)
    assert jobs.log().startswith(first.splitlines()[0])  # reading does not disturb what is written
    assert len(jobs.log()) > len(first)
    jobs.stop()
    jobs.start([str(tmp_path)], (tmp_path / "begun").exists)  # waits for the end of the first
    assert (tmp_path / "saved").exists()
    assert jobs.is_running()


def test_closing_the_studio_stops_the_run(jobs: Jobs, tmp_path: Path) -> None:
    jobs.start([str(tmp_path)], (tmp_path / "begun").exists)
    jobs.close()
    assert not jobs.is_running()
    assert (tmp_path / "saved").exists()
    jobs.close()


def test_an_error_is_its_last_line(tmp_path: Path) -> None:
    jobs = Jobs((sys.executable, "-c", "print('a'); print('error: there is no folder x'); raise SystemExit(1)"))
    with pytest.raises(ValueError, match=r"^the run did not start: there is no folder x$"):
        jobs.start([], (tmp_path / "begun").exists)
    jobs.close()


def test_a_child_ends_with_its_parent() -> None:
    """Also if the parent is killed: its end of the pipe closes then. Data workers are forked in the meantime."""
    code = f"""
        import importlib.util, multiprocessing, time
        spec = importlib.util.spec_from_file_location("child", {child.__file__!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.stop_with_parent()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        worker.start()
        worker.join(20)
        print(worker.exitcode, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == b"0\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) == -signal.SIGTERM
