"""What the studio's server refuses: files, routes, hosts, users without the password, and bad uploads."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner

from tokamix.cli import app as command
from tokamix.studio import StudioSettings, run_studio, start_studio
from tokamix.studio.look import Look
from tokamix.studio.photos import sample_photo
from tokamix.studio.view import View

MODEL = "pyramid_nano_sima.cifar100"
STATE = [None, [MODEL], ["mixing_row"], 0, 0, 0.5, 0.5]  # the photo is a state of the server


class Client:
    """A user of the page: requests as the browser makes them."""

    def __init__(self, app: gr.Blocks) -> None:
        self.app, self.http = app, httpx.Client(base_url=app.local_url, timeout=120)
        self.session = os.urandom(5).hex()

    def send(self, function: str, data: list[Any]) -> str:
        """Join the queue; returns the event's identifier."""
        number = next(n for n, entry in self.app.fns.items() if entry.name == function)
        body = {"data": data, "fn_index": number, "session_hash": self.session, "event_data": None}
        return self.http.post("/gradio_api/queue/join", json=body).raise_for_status().json()["event_id"]

    def receive(self) -> dict[str, Any]:
        """Wait for the result."""
        with self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session}) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if message.get("msg") == "process_completed":
                    return message
        raise AssertionError("no result")

    def ask(self, function: str, data: list[Any]) -> dict[str, Any]:
        self.send(function, data)
        return self.receive()

    def upload(self, content: bytes, name: str = "photo.png") -> httpx.Response:
        return self.http.post("/gradio_api/upload", files={"files": (name, content)})


@pytest.fixture(scope="module")
def app(settings: StudioSettings) -> Iterator[gr.Blocks]:
    server = start_studio(StudioSettings(port=0, folders=settings.folders, max_upload_bytes=100_000, device="cpu"))
    yield server
    server.close(verbose=False)


@pytest.fixture
def client(app: gr.Blocks) -> Iterator[Client]:
    user = Client(app)
    yield user
    user.http.close()


def file_data(path: str, **others: Any) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, **others}


def test_the_page_and_its_headers(client: Client) -> None:
    page = client.http.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    config = client.http.get("/config").json()
    assert config["analytics_enabled"] is False
    assert not client.app.share
    theme = client.http.get("/theme.css").text
    assert "http" not in theme.replace("http://www.w3.org", ""), "fonts are not downloaded"
    assert client.app.server_name == "127.0.0.1"


def test_no_file_is_served(client: Client, settings: StudioSettings, tmp_path: Path) -> None:
    (root,) = settings.folders
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    temporary = Path(os.environ["GRADIO_TEMP_DIR"])
    link = temporary / "link.txt"
    link.symlink_to(secret)
    inside = next(root.rglob("*.png"))
    try:
        paths = [
            *("/etc/passwd", str(secret), str(inside), str(link), str(Path(__file__)), str(Path(gr.__file__))),
            *(f"{temporary}/../../etc/passwd", f"{temporary}/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "etc/passwd"),
            *(
                "%2Fetc%2Fpasswd",
                "..%2f..%2fetc%2fpasswd",
                "file:///etc/passwd",
                "http://127.0.0.1:1/",
                "/etc/passwd%00.png",
            ),
        ]
        for path in paths:
            for route in ("/gradio_api/file=", "/gradio_api/file/", "/file=", "/static/", "/assets/", "/svelte/"):
                answer = client.http.get(route + path)
                assert answer.status_code in (400, 403, 404, 422), (route + path, answer.status_code)
                assert "root:" not in answer.text
                assert answer.text != "secret"
    finally:
        link.unlink()


@pytest.mark.parametrize(
    "route",
    [
        *(
            "/gradio_api/proxy=http://127.0.0.1:1/",
            "/gradio_api/info",
            "/gradio_api/openapi.json",
            "/docs",
            "/monitoring",
        ),
        *("/gradio_api/run-history/buckets", "/gradio_api/deep_link", "/gradio_api/vibe-code", "/gradio_api/runs"),
        *(
            "/gradio_api/custom_component/x/client/component/..%2f..%2findex.js",
            "/openapi.json",
            "/gradio_api/dev/reload",
        ),
    ],
)
def test_other_routes_do_not_exist(client: Client, route: str) -> None:
    assert client.http.get(route).status_code == 404
    assert client.http.post(route).status_code == 404


def test_posts_that_do_not_exist(client: Client) -> None:
    for route in (
        "process_recording",
        "vibe-edit",
        "api/draw",
        "run/draw",
        "call/draw",
        "component_server",
        "stream/x",
    ):
        assert client.http.post(f"/gradio_api/{route}", json={"data": STATE}).status_code == 404


def test_other_names_of_this_machine_are_refused(client: Client) -> None:
    """A page of the internet whose name points to 127.0.0.1 does not reach the studio."""
    for host, status in (("evil.example", 400), ("evil.example:7860", 400), ("localhost:1", 200), ("[::1]:7860", 200)):
        assert client.http.get("/config", headers={"host": host}).status_code == status


def test_paths_and_addresses_as_uploads(client: Client, settings: StudioSettings) -> None:
    inside = next(settings.folders[0].rglob("*.png"))
    data = "data:image/png;base64,iVBORw0KGgo="
    for upload in (
        file_data("/etc/passwd"),
        file_data(str(inside)),
        file_data(f"{os.environ['GRADIO_TEMP_DIR']}/../../etc/passwd"),
        file_data("http://127.0.0.1:1/a.png"),
        file_data("a.png", url=data),
        file_data("", url=data),
    ):
        answer = client.ask("take_photo", [upload, *STATE])
        assert not answer["success"], upload
        assert "Traceback" not in json.dumps(answer)
    assert inside.exists()


def test_uploads(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    sample_photo("flower").resize((64, 64)).save(path)
    stored = client.upload(path.read_bytes()).raise_for_status().json()[0]
    answer = client.ask("take_photo", [file_data(stored, orig_name="photo.png"), *STATE])
    assert answer["success"], answer
    assert not Path(stored).exists()
    assert client.upload(bytes(150_000)).status_code == 413
    for content in (b"<svg onload='alert(1)'/>", b"\x89PNG" + bytes(90)):
        stored = client.upload(content, "photo.svg").raise_for_status().json()[0]
        answer = client.ask("take_photo", [file_data(stored, orig_name="photo.svg"), *STATE])
        assert "not an image" in answer["output"]["error"]
        assert not Path(stored).exists()


def test_errors_are_sentences(client: Client) -> None:
    answer = client.ask("draw", [None, ["no_such_model"], [], 0, 0, 0.5, 0.5])
    assert "no model of that name" in answer["output"]["error"]
    answer = client.ask("draw", [None, 7, {}, "x", 0, 0.5, 0.5])
    assert not answer["success"]
    assert "Traceback" not in json.dumps(answer)


def test_ten_users_are_served_in_order(app: gr.Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[float] = []
    running, draw = threading.Semaphore(1), Look.draw

    def record(look: Look, view: View) -> Any:
        assert running.acquire(blocking=False), "two at once"
        served.append(view.x)
        result = draw(look, view)
        running.release()
        return result

    monkeypatch.setattr(Look, "draw", record)
    users = [Client(app) for _ in range(10)]
    for number, user in enumerate(users):
        user.send("draw", [*STATE[:-1], number / 10])
    assert all(user.receive()["success"] for user in users)
    assert served == [number / 10 for number in range(10)]
    for user in users:
        user.http.close()


def test_little_remains_of_requests(client: Client) -> None:
    """No file is left, and memory does not grow; `benchmarks/studio.py memory` makes 500 requests."""
    folder, process = Path(os.environ["GRADIO_TEMP_DIR"]), psutil.Process()

    def work(count: int) -> None:
        for number in range(count):
            assert client.ask("draw", [*STATE[:-1], number % 20 / 20])["success"]

    work(20)
    files, memory = len(list(folder.rglob("*"))), process.memory_info().rss
    work(40)
    assert len(list(folder.rglob("*"))) == files
    assert process.memory_info().rss - memory < 20e6


def test_password() -> None:
    server = start_studio(StudioSettings(host="0.0.0.0", port=0, password="correct horse", device="cpu"))
    try:
        user = Client(server)
        assert "auth_required" in user.http.get("/").text
        for route in ("/config", "/gradio_api/file=/etc/passwd", "/gradio_api/queue/data?session_hash=a"):
            assert user.http.get(route).status_code == 401
        assert user.upload(b"x").status_code == 401
        assert user.http.post("/gradio_api/queue/join", json={"data": [], "fn_index": 0}).status_code == 401
        login = {"username": "me", "password": "wrong"}
        assert user.http.post("/login", data=login).status_code == 400
        assert user.http.post("/login", data={**login, "password": "correct horse"}).status_code == 200
        assert user.http.get("/config").status_code == 200
    finally:
        server.close(verbose=False)


def test_command_asks_for_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StudioSettings] = []
    monkeypatch.setattr("tokamix.studio.run_studio", started.append)
    arguments = ["studio", "--host", "0.0.0.0", "--no-browser"]
    assert CliRunner().invoke(command, arguments, input="secret\n").exit_code == 0
    assert CliRunner().invoke(command, arguments, env={"TOKAMIX_STUDIO_PASSWORD": "other"}).exit_code == 0
    assert CliRunner().invoke(command, ["studio"]).exit_code == 0
    assert [settings.password for settings in started] == ["secret", "other", None]
    result = CliRunner().invoke(command, [*arguments, "--password", ""])
    assert result.exit_code == 1
    assert "can be reached by other machines" in result.output


def test_without_gradio(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tokamix.studio")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setitem(sys.modules, "starlette", None)
    result = CliRunner().invoke(command, ["studio"])
    assert result.exit_code == 1
    assert "the studio needs Gradio: pip install 'tokamix[studio]'" in " ".join(result.output.split())


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    servers = []

    def start_and_interrupt(settings: StudioSettings) -> gr.Blocks:
        servers.append(start_studio(settings))
        os.kill(os.getpid(), signal.SIGINT)
        return servers[0]

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("tokamix.studio.app.start_studio", start_and_interrupt)
    run_studio(StudioSettings(port=0, device="cpu"))
    assert not servers[0].is_running
    assert signal.getsignal(signal.SIGINT) is before
    assert "Traceback" not in capfd.readouterr().err


def test_terminated(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tokamix", "studio", "--port", "0", "--no-browser", "--device", "cpu"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        assert list(tmp_path.glob("tokamix-studio-*"))
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in out + err
    assert not list(tmp_path.glob("tokamix-studio-*")), "uploads are deleted"


def test_photos_keep_no_place(client: Client, tmp_path: Path) -> None:
    """A photo with a place in its EXIF data, as a phone writes it: what the page gets back has none."""
    exif = Image.Exif()
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.0)
    path = tmp_path / "photo.jpg"
    sample_photo("temple").resize((64, 64)).save(path, exif=exif)
    stored = client.upload(path.read_bytes(), "photo.jpg").json()[0]
    answer = client.ask("take_photo", [file_data(stored, orig_name="photo.jpg"), *STATE])
    assert "Exif" not in json.dumps(answer)
    assert not Path(stored).exists()
