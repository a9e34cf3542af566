"""The page for Prometheus: its format, who may read it, what it survives, and that a real Prometheus takes it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Trainer
from shoal.core.errors import ConfigError
from shoal.core.events import CheckpointSaved, EvalDone, RunEnded, RunFailed, RunStarted, StepDone, WorkerSeen
from shoal.core.traffic import Flow, Traffic
from shoal.monitor import scrape
from shoal.monitor.exposition import Family, render
from shoal.monitor.prometheus import Prometheus

KEY = "a-key-of-32-characters-or-more-x"


def started(run: str = "digits-1", step: int = 0) -> RunStarted:
    return RunStarted(
        step=step,
        run_id=run,
        name='a "name"\\\nof two lines',
        run_dir=None,
        workers=2,
        total_steps=500,
        steps_per_epoch=10,
        samples_per_epoch=320,
        batch_size=32,
    )


def done(step: int, *, loss: float = 0.5, time: float = 0.0) -> StepDone:
    return StepDone(step=step, epoch=0, loss=loss, samples=32, rates=[0.01, 0.1], time=time or 1000.0 + step)


@pytest.fixture
def listener() -> Iterator[Prometheus]:
    with Prometheus(0) as made:
        made(started())
        yield made


def ask(
    port: int, path: str = "/metrics", method: str = "GET", key: str | None = None, host: str = "127.0.0.1"
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request(method, path, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def samples(page: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))


def test_the_figures_of_a_run(listener: Prometheus) -> None:
    for step in range(1, 5):
        listener(done(step, loss=1 / step))
    listener(EvalDone(step=4, epoch=0, metrics={"accuracy": 0.75}))
    listener(CheckpointSaved(step=3, path="/somewhere", best=False))
    seconds = {"compute": 1.5, "idle": 0.25}
    for worker in (0, 1):
        flows = [Flow("gradient", "none", "memory", 990, 8), Flow("control", "none", "loopback", 10, 2)]
        sent = Traffic(flows, operations=5, exchange=0.5, exposed=0.25)
        listener(WorkerSeen(step=4, worker=worker, samples=64, seconds=seconds, traffic=sent, memory=1 << 40))
    status, page, headers = ask(listener.port)
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(page)
    info = found.pop(next(name for name in found if name.startswith("shoal_run_info")))
    assert info == "1"
    assert found == {
        "shoal_up": "1",
        "shoal_planned_steps": "500",
        "shoal_step": "4",
        "shoal_steps_total": "4",
        "shoal_samples_total": "128",
        "shoal_loss": "0.25",
        "shoal_learning_rate": "0.01",
        "shoal_samples_per_second": "32.0",
        'shoal_eval{metric="accuracy"}': "0.75",
        "shoal_checkpoint_step": "3",
        'shoal_sent_bytes_total{kind="gradient",codec="none",link="memory"}': "1980",
        'shoal_sent_bytes_total{kind="control",codec="none",link="loopback"}': "20",
        'shoal_sent_messages_total{kind="gradient",codec="none",link="memory"}': "16",
        'shoal_sent_messages_total{kind="control",codec="none",link="loopback"}': "4",
        **{
            f'shoal_worker_{name}{{worker="{worker}"{part}}}': value
            for worker in (0, 1)
            for name, part, value in (
                ("seconds_total", ',part="compute"', "1.5"),
                ("seconds_total", ',part="idle"', "0.25"),
                ("memory_bytes", "", str(1 << 40)),
                ("bytes_sent_total", "", "1000"),
                ("operations_total", "", "5"),
                ("exchange_seconds_total", "", "0.5"),
                ("exposed_seconds_total", "", "0.25"),
            )
        },
    }


def test_one_worker_has_no_traffic(listener: Prometheus) -> None:
    listener(WorkerSeen(step=4, worker=0, samples=64, seconds={"compute": 1.0}, memory=1))
    _, page, _ = ask(listener.port)
    assert "shoal_worker_memory_bytes" in page and "exchange" not in page and "shoal_sent" not in page


def test_the_run_is_named_with_labels_escaped(listener: Prometheus) -> None:
    _, page, _ = ask(listener.port)
    line = next(line for line in page.splitlines() if line.startswith("shoal_run_info"))
    assert line.startswith(r'shoal_run_info{run="digits-1",name="a \"name\"\\\nof two lines",version="')
    assert line.endswith('"} 1')


def test_every_metric_has_help_and_type_once_before_its_values(listener: Prometheus) -> None:
    listener(done(1))
    _, page, _ = ask(listener.port)
    assert page.endswith("\n")
    described: list[str] = []
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            assert name not in described
            described.append(name)
        elif not line.startswith("#"):
            assert line.split("{")[0].split()[0] == described[-1]
    assert page.count("# HELP") == len(described) == 8


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "NaN"), (float("inf"), "+Inf"), (-float("inf"), "-Inf"), (1e-30, "1e-30"), (3, "3"), (True, "1")],
)
def test_numbers_as_the_format_has_them(value: float, text: str) -> None:
    assert render([Family("a", "gauge", "b\nc\\").add(value)]) == f"# HELP a b\\nc\\\\\n# TYPE a gauge\na {text}\n"


def test_text_that_is_no_unicode_is_sent_all_the_same(listener: Prometheus) -> None:
    listener(EvalDone(step=1, epoch=0, metrics={"odd\udc80": 1.0}))
    status, page, _ = ask(listener.port)
    assert status == 200 and r"odd\\udc80" in page


def test_a_new_run_begins_anew_on_the_same_port(listener: Prometheus) -> None:
    listener(done(1))
    port = listener.port
    listener(RunEnded(step=1, loss=0.5, metrics={}, reason="complete"))
    assert samples(ask(port)[1])["shoal_up"] == "0"
    assert samples(ask(port)[1])["shoal_step"] == "1", "the last figures stay until the next run"
    listener(started("digits-2", step=40))
    found = samples(ask(port)[1])
    assert listener.port == port
    assert (found["shoal_up"], found["shoal_step"], found["shoal_steps_total"]) == ("1", "40", "0")
    assert "shoal_loss" not in found
    listener(RunFailed(step=41, error="no"))
    assert samples(ask(port)[1])["shoal_up"] == "0"


def test_nothing_is_open_before_a_run_and_after_close() -> None:
    before = threading.active_count()
    listener = Prometheus(0)
    assert listener.port == 0 and threading.active_count() == before
    listener(started())
    port = listener.port
    assert port > 0 and ask(port)[0] == 200
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    again = Prometheus(port)
    again(started())
    assert again.port == port
    again.close()


@pytest.mark.parametrize("path", ["/", "/metrics", "/metrics?name=x"])
def test_get_and_head(listener: Prometheus, path: str) -> None:
    status, body, headers = ask(listener.port, path)
    assert status == 200 and len(body.encode()) == int(headers["Content-Length"]) > 0
    status, empty, head = ask(listener.port, path, "HEAD")
    assert status == 200 and empty == "" and head["Content-Length"] == headers["Content-Length"]


def test_nothing_else(listener: Prometheus) -> None:
    assert ask(listener.port, "/etc/passwd")[0] == 404
    assert ask(listener.port, "/metrics/../x")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(listener.port, method=method)[0] == 501


# -- who may read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "metrics.example.org"])
def test_others_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host=.*give key="):
        Prometheus(0, host=host)


@pytest.mark.parametrize("key", ["", "two words", "line\n", "schlüssel", "x" * 2000])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="key= must be") as caught:
        Prometheus(0, key=key)
    assert not key or key not in str(caught.value)


def test_with_a_key_on_all_addresses(capfd: pytest.CaptureFixture[str]) -> None:
    with Prometheus(0, host="0.0.0.0", key=KEY) as listener:
        listener(started())
        for path in ("/metrics", "/", "/elsewhere"):
            status, body, headers = ask(listener.port, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "shoal_" not in body
        assert ask(listener.port, key=KEY[:-1])[0] == 401
        assert ask(listener.port, key=KEY + "x")[0] == 401
        assert ask(listener.port, key="é")[0] == 401
        assert ask(listener.port, key=KEY)[0] == 200
        assert KEY not in repr(listener)
        wrong = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=5)
        wrong.request("GET", "/metrics", headers={"Authorization": f"Basic {KEY}"})
        assert wrong.getresponse().status == 401
        wrong.close()
    out = capfd.readouterr()
    assert KEY not in out.out + out.err
    assert out.err == f"shoal: metrics at http://0.0.0.0:{listener.port}/metrics with a key\n"


def test_where_the_metrics_are_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Prometheus(0) as listener:
        listener(started())
        listener(started())
        assert capsys.readouterr().err == f"shoal: metrics at http://127.0.0.1:{listener.port}/metrics\n"


@pytest.mark.parametrize("port", [-1, 65536, True, "9100", 1.0])
def test_ports_that_are_none(port: Any) -> None:
    with pytest.raises(ConfigError, match=r"port=.*0 \(a free port\)"):
        Prometheus(port)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port} .*another port"):
            Prometheus(port)


def test_a_port_lost_before_the_run_does_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listener = Prometheus(port)
    with socket.create_server(("127.0.0.1", port)):
        listener(started())
        listener(done(1))
        listener.close()
    assert f"shoal: Prometheus: port {port}: " in capsys.readouterr().err


# -- what it survives --------------------------------------------------------------------------------------------------


def test_slow_and_long_requests_are_cut_off(listener: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        begun = time.monotonic()
        assert ask(listener.port)[0] == 200, "others are answered meanwhile"
        assert slow.recv(1) == b""
        assert 0.2 < time.monotonic() - begun < 3
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as long:
        long.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * scrape.MOST_HEAD)
        assert received(long) == b""
    for rubbish in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as odd:
            odd.sendall(rubbish)
            assert b"200 OK" not in received(odd)
    assert ask(listener.port)[0] == 200


def received(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:
        pass  # closed with bytes of the request unread
    return data


def test_connections_at_once_are_bounded(listener: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "REQUEST_SECONDS", 1.0)
    idle = [socket.create_connection(("127.0.0.1", listener.port), timeout=5) for _ in range(scrape.MOST_AT_ONCE)]
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as more:
        assert received(more) == b""
    for connection in idle:
        assert received(connection) == b""
        connection.close()
    assert ask(listener.port)[0] == 200


def test_a_forked_child_does_not_keep_the_port() -> None:
    listener = Prometheus(0)
    listener(started())
    go_on, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.read(go_on, 1)
        os._exit(0)
    os.close(go_on)
    try:
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port), timeout=5)
    finally:
        os.close(told)
        os.waitpid(child, 0)


# -- in a training -----------------------------------------------------------------------------------------------------


def train(*callbacks: Any, steps: int = 12) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    Trainer(
        nn.Linear(4, 1),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda params: torch.optim.SGD(params, lr=0.1),
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        batch_size=8,
        steps=steps,
        workers=2,
        callbacks=callbacks,
    ).fit()


def test_two_trainings_on_two_workers() -> None:
    with Prometheus(0) as listener:
        for _ in range(2):
            train(listener)
            found = samples(ask(listener.port)[1])
            assert (found["shoal_step"], found["shoal_samples_total"], found["shoal_up"]) == ("12", "96", "0")
            assert found["shoal_learning_rate"] == "0.1"


CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: shoal
    authorization: {{credentials: "{key}"}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_reads_it(tmp_path: Path) -> None:
    with Prometheus(0, key=KEY) as listener:
        listener(started())
        for step in range(1, 8):
            listener(done(step, loss=float("nan")))
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(key=KEY, port=listener.port))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = (tmp_path / "log").open("wb")
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd=tmp_path,
        )
        try:
            deadline = time.monotonic() + 30
            assert wait_for(port, "up", deadline, server) == "1"
            assert wait_for(port, "shoal_step", deadline, server) == "7"
            assert query(port, "shoal_loss") == "NaN"
            assert query(port, "shoal_samples_total") == "224"
            targets = fetch(f"http://127.0.0.1:{port}/api/v1/targets")["activeTargets"]
            assert [target["lastError"] for target in targets] == [""]
        except BaseException:
            print((tmp_path / "log").read_text(), file=sys.stderr)
            raise
        finally:
            server.kill()
            server.wait(10)
            log.close()


def wait_for(port: int, expression: str, deadline: float, server: subprocess.Popen[bytes]) -> str:
    while time.monotonic() < deadline and server.poll() is None:
        try:
            value = query(port, expression)
        except OSError:  # not up yet
            value = None
        if value is not None:
            return value
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not tell {expression}")


def query(port: int, expression: str) -> str | None:
    result = fetch(f"http://127.0.0.1:{port}/api/v1/query?query={expression}")["result"]
    return result[0]["value"][1] if result else None


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=2) as answer:
        return json.load(answer)["data"]
