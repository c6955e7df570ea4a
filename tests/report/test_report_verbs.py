"""report, compare and watch on the command line."""

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from loopwright.api import Run
from loopwright.cli import VERBS, main
from loopwright.errors import InputError
from loopwright.report import ReportServer
from loopwright.report.server import HOST, MOST_CONNECTIONS, next_free
from report.folders import LABELS, RESULT, finished_run, make_run, records, served, write_lines


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOOPWRIGHT_RUNS", raising=False)
    return finished_run(tmp_path / "runs" / "1115-cats-1")


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.read().decode()


def test_report_and_compare_write_the_page_of_one_run_or_several(run, capsys, tmp_path):
    assert main(["report", "1115-cats-1"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.resolve() == run / "report.html" and "<h2>Curves</h2>" in path.read_text(encoding="utf-8")
    other = make_run(tmp_path / "runs" / "1116-cats-2", result=RESULT, labels=LABELS)
    assert main(["report", str(run), str(other), "--out", "both.html"]) == 0
    assert main(["compare", str(run), "1116"]) == 0
    sentence = "There is no verdict on 1115-cats-1 and 1116-cats-2: they have no scores of single rows."
    assert capsys.readouterr().out.splitlines() == ["both.html", sentence, str(run / "compare.html"), sentence]
    assert "2 runs side by side" in Path("both.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["report", "1115-cat-2"], ["error[run.unknown]", "near: 1115-cats-1"]),
        (["report"], ["error[args.value]", "needs a run"]),
        (["report", "1115", "--opne"], ["error[args.unknown]", "--open instead of --opne"]),
        (["report", "1115", "--out", "none/x.html"], ["error[args.value]", "which does not exist"]),
        (["report", "1115", "--out", "."], ["error[args.value]", "--out . is a folder"]),
        (["compare", "1115"], ["error[args.value]", "needs two runs"]),
        (["watch", "1115", "--port", "70000"], ["error[args.value]", "not between 0 and 65535"]),
    ],
    ids=["unknown-run", "no-run", "unknown-flag", "no-folder", "a-folder", "one-run", "no-port"],
)
def test_unusable_arguments_are_refused_with_a_fix(run, capsys, argv, expected):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in [*expected, "fix: "])


def test_every_verb_about_a_run_is_a_function_or_a_method_of_one():
    verbs = [verb for verb, (_, arguments, _) in VERBS.items() if arguments.startswith(("RUN", "[RUN"))]
    assert len(verbs) >= 9
    assert [verb for verb in verbs if not callable(getattr(Run, verb, None))] == []


def test_runs_are_listed_and_compared_in_python_as_on_the_command_line(run, tmp_path, capsys):
    other = make_run(tmp_path / "runs" / "1116-cats-2", result=RESULT, labels=LABELS)
    third = make_run(tmp_path / "third", result=RESULT, labels=LABELS)
    assert main(["compare", "1115", "1116"]) == 0
    by_verb = (run / "compare.html").read_bytes()
    (run / "compare.html").unlink()
    assert Run.find("1115").compare("1116") == Path("runs/1115-cats-1/compare.html")
    assert (run / "compare.html").read_bytes() == by_verb
    path = Run.find(run).compare(Run.find(other), third, out=tmp_path / "three.html")
    assert path == tmp_path / "three.html" and "3 runs side by side" in path.read_text(encoding="utf-8")
    expected = "out='none/x.html' is in none, which does not exist\n  fix: out='x.html'"
    with pytest.raises(InputError, match=expected):
        Run.find(run).compare(other, out="none/x.html")
    with pytest.raises(InputError, match=expected):
        Run.find(run).report(out="none/x.html")
    make_run(tmp_path / "runs" / "1116-cats-2")
    assert sorted(one.id for one in Run.all()) == ["1115-cats-1", "1116-cats-2"]


def test_the_page_of_a_run_is_served_in_the_background_until_it_is_closed(run):
    with Run.find(run).watch(port=0) as page:
        assert "<h2>Curves</h2>" in get(page.url) and repr(page) == f"Watch({page.url})"
        port = int(page.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(InputError, match=rf"port {port} is in use\n  fix: port=\d+"):
            Run.find(run).watch(port)
    page.close()
    assert repr(page) == f"Watch({page.url}, closed)"
    with pytest.raises(urllib.error.URLError):
        get(page.url)


def test_the_verbs_import_no_torch(run):
    code = "import sys, loopwright.cli as c; code = c.main(['report', '1115']); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_watch_renders_the_page_again_when_the_run_changes_and_answers_no_other_name(run):
    write_lines(run / "metrics.jsonl", records(20))
    with served(run) as server:
        stamp, page = get(f"{server.url}stamp"), get(server.url)
        assert "setInterval" in page and '"x":[10,20]' in page
        assert get(f"{server.url}stamp") == stamp and len(json.loads(stamp)) == 4
        write_lines(run / "metrics.jsonl", records(40))
        assert get(f"{server.url}stamp") != stamp
        assert '"x":[10,20,30,40]' in get(server.url)
    with served(run) as server:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(server.url, Host="evil.example")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{server.url}../run.json")
        assert "<h2>Curves</h2>" in get(server.url)


def test_idle_slow_and_broken_connections_are_bounded_and_silent(run, capfd):
    with served(run) as server:
        server.most_seconds, threads, address = 1.0, threading.active_count(), server.server_address
        idle = [socket.create_connection(address) for _ in range(3 * MOST_CONNECTIONS)]
        time.sleep(0.1)
        assert threading.active_count() - threads <= MOST_CONNECTIONS
        begun = time.monotonic()
        for each in idle:
            each.settimeout(5)
            while time.monotonic() - begun < 5:
                try:
                    each.sendall(b"G")  # a byte now and then does not keep it open
                    each.settimeout(0.05)
                    assert each.recv(1) == b""
                except TimeoutError:
                    continue
                except OSError:
                    pass
                break
        assert 0.5 < time.monotonic() - begun < 4
        for sent in (b"\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n", b"A" * 70_000):
            with socket.create_connection(address) as gone:
                gone.sendall(sent)
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it
        assert "<h2>Curves</h2>" in get(server.url)
        [each.close() for each in idle]
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_in_use_is_refused_and_a_free_one_named(run, capsys):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = next_free(port + 1)
        assert free > port
        with pytest.raises(InputError, match="watch.port"):
            ReportServer(run, port)
        assert main(["watch", str(run), "--port", str(port)]) == 2
        error = capsys.readouterr().err
        assert "error[watch.port]" in error and "is in use" in error and "fix: --port " in error


def test_watch_of_a_finished_run_prints_that_and_serves_its_page(run):
    command = [sys.executable, "-m", "loopwright", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        url, notice = watching.stdout.readline().split()[0], watching.stdout.readline()
        page = get(url)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    assert notice.startswith("this run has ended (done)")
    assert 'data-live="no"' in page and "This run is in progress" not in page


def test_a_run_that_has_not_ended_and_one_of_another_task_are_compared_with_notes(run, tmp_path, capsys):
    other = make_run(tmp_path / "runs" / "1116-lm-2", "causal-lm", state="running", metrics=records(20)[:-1])
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"event": "log", "upd\n')
    assert main(["compare", str(run), str(other), "--out", "both.html"]) == 0
    page = Path("both.html").read_text(encoding="utf-8")
    assert "different tasks (text-classification, causal-lm)" in page
    assert "No result yet" in page and "1116-lm-2: 1 line of metrics.jsonl is damaged" in page


def test_without_a_browser_the_page_is_written_and_said_to_be_there(run, capsys, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", str(run), "--open"]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}\nno browser was found here: open {page} in one yourself\n"
