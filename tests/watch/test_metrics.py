"""What monitoring reads of a diagnosis: its file in the format of Prometheus, and its spans."""

import importlib.util
import re
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rankmesh.debug.doctor import doctor
from rankmesh.debug.watch.metrics import FILE, metrics_of, send_trace, write_prometheus

RECORDINGS = Path(__file__).parents[1] / "hangs" / "recordings"
_SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


@pytest.fixture
def found():
    """The numbers of a job of 4 ranks, of which rank 3 loads its data while rank 1 waits for it."""
    return metrics_of(doctor(RECORDINGS / "loads_slowly"))


def _samples(text):
    """Each sample of a file by name and labels, by the rules of the format."""
    if importlib.util.find_spec("prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families

        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    declared, samples = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            declared.add(line.split()[2])
        elif not line.startswith("#"):
            name, labels, number = _SAMPLE.fullmatch(line).groups()
            assert name in declared, line
            listed = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)
            plain = {key: re.sub(r"\\(.)", _unescaped, value) for key, value in listed}
            samples[name, tuple(sorted(plain.items()))] = float(number)
    assert text.endswith("\n")
    return samples


def _unescaped(match):
    return {"n": "\n"}.get(match[1], match[1])


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


def test_a_hang_that_is_over(found, tmp_path):
    """The same file, in which nothing hangs."""
    for hangs in (True, False):
        write_prometheus(tmp_path, found, hangs=hangs)
    assert _values(_samples((tmp_path / FILE).read_text(encoding="utf-8")), "hang") == {(): 0.0}


def test_labels_of_any_text(found, tmp_path):
    """Quotes, backslashes and line ends in a verdict are those of the label."""
    verdict = 'a "file\\name"\nand {more}'
    write_prometheus(tmp_path, type(found)(**{**vars(found), "verdict": verdict}), hangs=True)
    samples = _samples((tmp_path / FILE).read_text(encoding="utf-8"))
    assert [dict(labels)["verdict"] for name, labels in samples if name == "rankmesh_diagnosis_info"] == [verdict]


class _Traced:
    """What OpenTelemetry's API keeps of a span."""

    def __init__(self, name, context=None, attributes=None, start_time=None):
        self.name, self.context, self.attributes, self.start = name, context, attributes, start_time
        self.events, self.ended, self.status = [], None, None

    def add_event(self, name, attributes=None, timestamp=None):
        self.events.append((name, attributes, timestamp))

    def set_status(self, status, description=None):
        self.status = status, description

    def end(self, end_time=None):
        self.ended = end_time


@pytest.fixture
def traced(monkeypatch):
    """The spans that are sent, by a stand-in for the part of OpenTelemetry's API that is called."""
    sent, flushed = [], []

    def start_span(name, context=None, attributes=None, start_time=None):
        sent.append(_Traced(name, context, attributes, start_time))
        return sent[-1]

    trace, context = ModuleType("opentelemetry.trace"), ModuleType("opentelemetry.context")
    trace.get_tracer = lambda _: SimpleNamespace(start_span=start_span)
    trace.get_tracer_provider = lambda: SimpleNamespace(force_flush=flushed.append)
    trace.set_span_in_context = lambda parent, _: parent
    trace.StatusCode = SimpleNamespace(ERROR="error")
    context.Context = dict
    parent = ModuleType("opentelemetry")
    parent.trace, parent.context = trace, context
    for module in (parent, trace, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield sent
    assert len(flushed) == bool(sent)


def test_the_trace_of_a_hang(found, traced):
    """A span of the hang with the diagnosis as its event, and within it one of each call that ranks wait in."""
    send_trace(found)
    hang, *waits = traced
    ((name, event, when),) = hang.events
    assert (hang.name, name, when, hang.ended, hang.status) == (
        "rankmesh.hang", "rankmesh.diagnosis", found.time, found.time, ("error", found.verdict)
    )  # fmt: skip
    assert (hang.attributes["rankmesh.cause"], hang.attributes["rankmesh.ranks"]) == ("late", [3])
    assert hang.attributes["rankmesh.slowest_kind"] == found.slowest
    assert event["rankmesh.states"] == found.states
    assert event["rankmesh.calls_behind.dp"] == 1
    assert hang.start < found.time
    assert [wait.context for wait in waits] == [hang] * len(waits) != []
    assert {wait.attributes["rankmesh.group"] for wait in waits} >= {"dp@tp1"}


def test_nothing_is_sent_where_nothing_hangs(found, traced):
    """A diagnosis on demand of a job that works has no spans."""
    send_trace(type(found)(**{**vars(found), "cause": {}}))
    assert traced == []


def test_without_opentelemetry(found, monkeypatch):
    """Without its API nothing is sent, and nothing is wrong."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    send_trace(found)


def test_opentelemetry_itself(found):
    """The SDK, where it is installed, takes what is sent: one trace with the group's name."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    send_trace(found)
    *waits, hang = sorted(exporter.get_finished_spans(), key=lambda one: one.parent is None)
    assert hang.name == "rankmesh.hang"
    assert hang.attributes["rankmesh.group"] == "dp@tp1"
    assert {wait.parent.trace_id for wait in waits} == {hang.context.trace_id}
    assert hang.events[0].attributes["rankmesh.verdict"] == found.verdict
