"""What monitoring reads of a diagnosis: its file in the format of Prometheus, and its spans."""

import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rankmesh.debug.doctor import doctor
from rankmesh.debug.slow import Finding, SlowReport
from rankmesh.debug.watch.metrics import FILE, metrics_of, send_slow, send_trace, write_prometheus, write_slow

RECORDINGS = Path(__file__).parents[1] / "hangs" / "recordings"
_SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


@pytest.fixture
def found():
    """The numbers of a job of 4 ranks, of which rank 3 loads its data while rank 1 waits for it."""
    return metrics_of(doctor(RECORDINGS / "loads_slowly"))


def _samples(text):
    """Each sample of a file by name and labels, by the rules of the format."""
    declared, samples = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            declared.add(line.split()[2])
        elif not line.startswith("#"):
            name, labels, number = _SAMPLE.fullmatch(line).groups()
            assert name in declared, line
            listed = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)
            plain = {
                key: re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)
                for key, value in listed
            }
            samples[name, tuple(sorted(plain.items()))] = float(number)
    assert text.endswith("\n")
    return samples


def _values(samples, name):
    """The samples of one name by their labels without the run and free text."""
    return {
        tuple(value for key, value in labels if key not in ("run", "verdict")): number
        for (metric, labels), number in samples.items()
        if metric == f"rankmesh_{name}"
    }


def test_the_file_of_a_hang(found, tmp_path):
    """States, calls behind by kind, seconds waiting, the slowest kind and the diagnosis; another user may read it."""
    write_prometheus(tmp_path, found, hangs=True)
    samples = _samples((tmp_path / FILE).read_text(encoding="utf-8"))
    assert _values(samples, "hang") == {(): 1.0}
    assert _values(samples, "rank_state") == {
        (str(rank), state): 1.0 for rank, state in enumerate(("ended", "waiting", "ended", "late"))
    }
    assert _values(samples, "rank_calls_behind")[("dp", "3")] == 1.0
    assert max(_values(samples, "kind_waiting_seconds").values()) == max(found.waiting.values()) > 0
    ((info, one),) = _values(samples, "diagnosis_info").items()
    assert (one, found.slowest in info, "late" in info, "3" in info) == (1.0, True, True, True)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) & 0o400
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    write_prometheus(tmp_path, found, hangs=False)  # it is over
    assert _values(_samples((tmp_path / FILE).read_text(encoding="utf-8")), "hang") == {(): 0.0}


def test_labels_of_any_text(found, tmp_path):
    """Quotes, backslashes and line ends in a verdict are those of the label."""
    verdict = 'a "file\\name"\nand {more}'
    write_prometheus(tmp_path, type(found)(**{**vars(found), "verdict": verdict}), hangs=True)
    samples = _samples((tmp_path / FILE).read_text(encoding="utf-8"))
    assert [dict(labels)["verdict"] for name, labels in samples if name == "rankmesh_diagnosis_info"] == [verdict]


def test_without_opentelemetry(found, monkeypatch):
    """Without its API nothing is sent, and nothing is wrong."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    send_trace(found)


@pytest.fixture(scope="module")
def _exported():
    """OpenTelemetry's own exporter, to which this process sends from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=600_000))  # sent when it is flushed
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def sent(_exported):
    """The spans that a test sends, in the order of their starts."""
    _exported.clear()
    return lambda: sorted(_exported.get_finished_spans(), key=lambda one: (one.parent is not None, one.start_time))


def test_the_trace_of_a_hang(found, sent):
    """A span of the hang with the diagnosis as its event, and within it one of each call that ranks wait in."""
    send_trace(found)
    hang, *waits = sent()
    (diagnosis,) = hang.events
    assert (hang.name, diagnosis.name, diagnosis.timestamp) == ("rankmesh.hang", "rankmesh.diagnosis", found.time)
    assert (hang.end_time, hang.status.status_code) == (found.time, trace.StatusCode.ERROR)
    assert hang.status.description == diagnosis.attributes["rankmesh.verdict"] == found.verdict
    assert (hang.attributes["rankmesh.cause"], hang.attributes["rankmesh.ranks"]) == ("late", (3,))
    assert hang.attributes["rankmesh.group"] == "dp@tp1"
    assert hang.attributes["rankmesh.slowest_kind"] == found.slowest
    assert diagnosis.attributes["rankmesh.states"] == tuple(found.states)
    assert diagnosis.attributes["rankmesh.calls_behind.dp"] == 1
    assert hang.start_time < found.time
    assert [wait.parent for wait in waits] == [hang.context] * len(waits) != []
    assert {wait.attributes["rankmesh.group"] for wait in waits} >= {"dp@tp1"}


def test_nothing_is_sent_where_nothing_hangs(found, sent):
    """A diagnosis on demand of a job that works has no spans."""
    send_trace(type(found)(**{**vars(found), "cause": {}}))
    assert sent() == []


# -- a slow job --------------------------------------------------------------------------------------


@pytest.fixture
def slow():
    """A report on a job of 2 ranks on 2 hosts, of which rank 1 computes for too long."""
    finding = Finding("computes", (1,), "dp@tp0", "dp", None, ("b",), 0.1, 0.2, 0.5, 1, 1e9, "it computes for longer")
    names, zeros = ("a", "b"), (0.0, 0.0)
    return SlowReport(1e9 + 60, 60.0, 120, 0.5, 0.1, (finding,), names, (0, 1), (0, 0), (0.0, 0.1), zeros, zeros, ())


def test_the_file_of_a_slow_job(found, slow, tmp_path):
    """Step, share, each rank and each finding, beside what hangs; each writer leaves what the other one wrote."""
    for _ in range(2):
        write_prometheus(tmp_path, found, hangs=True)
        write_slow(tmp_path, slow, found.run)
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    samples = _samples(text)
    assert _values(samples, "step_seconds") == {(): 0.5}
    assert _values(samples, "lost_share") == {(): 0.1}
    assert _values(samples, "rank_caused_seconds") == {("a", "0"): 0.0, ("b", "1"): 0.1}
    assert _values(samples, "slow") == {("computes", "dp@tp0", "dp", "", "1"): 0.1}
    assert {dict(labels)["run"] for name, labels in samples} == {found.run}
    assert _values(samples, "hang") == {(): 1.0}
    assert text.count("# TYPE rankmesh_hang ") == text.count("# TYPE rankmesh_slow ") == 1
    write_slow(tmp_path, replace(slow, findings=()), found.run)
    assert _values(_samples((tmp_path / FILE).read_text(encoding="utf-8")), "slow") == {}
    write_slow(tmp_path, slow, "another run")
    assert _values(_samples((tmp_path / FILE).read_text(encoding="utf-8")), "hang") == {}


def test_what_is_sent_of_a_slow_job(slow, sent):
    """One for each finding, since it began."""
    send_slow(slow)
    trace.get_tracer_provider().force_flush()
    (found,) = sent()
    assert (found.name, found.start_time, found.end_time) == ("rankmesh.slow", 10**18, 10**18 + 60 * 10**9)
    assert (found.attributes["rankmesh.cause"], found.attributes["rankmesh.ranks"]) == ("computes", (1,))
    assert found.attributes["rankmesh.sentence"] == slow.findings[0].sentence
