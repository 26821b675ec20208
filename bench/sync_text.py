"""The section of docs/benchmarks.md on syncing weights: what ``bench/sync.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["sync_section"]

_WORDS = {
    "copy": "plain copy, on the trainer and then on the engine",
    "files": "rankmesh, shared memory: publish, then receive",
    "socket": "raw TCP sockets, no packing, one buffer",
    "gloo_plain": "gloo's own messages, no packing, one buffer",
    "gloo": 'rankmesh, gloo, `update="copy"`',
    "gloo_swap": 'rankmesh, gloo, `update="swap"`',
    "full_tensor": "`full_tensor` and broadcast, gloo",
    "checkpoint": "torch DCP: save to shared memory, then load",
}
_RATES = {"gloo_plain": "gloo's own messages", "gloo": "gloo, copy", "gloo_swap": "gloo, swap"}


def sync_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    llama, kimi, machine = found["llama"], found["kimi"], found["machine"]
    yield from ("", "## Sync with engines", "")
    yield (
        f"One version of Llama 3 8B at a tenth of its width, bfloat16, {llama['bytes'] / 1e6:.0f} MB, from two trainer "
        f"ranks (rows, as FSDP) to two engine ranks (tp=2). Medians of {llama['rounds']} alternating rounds, with the "
        f"lowest and the highest; four ranks on {machine['cores']} cores, load {llama['load'][1]:.1f} after. torch "
        f"{machine['torch']}. `python -m bench.sync --json bench/sync.json`"
    )
    yield from ("", "| method | milliseconds | peak memory of a rank, MB |", "| --- | --- | --- |")
    for name, words in _WORDS.items():
        seconds, memory = llama["seconds"][name], llama["memory"][name]
        yield f"| {words} | {_cell([1e3 * value for value in seconds], 0)} | {memory / 1e6:.0f} |"
    yield from ("", "checkpoint-engine 0.4.2 is not among them: its `ParameterServer` needs CUDA or an NPU.")
    yield from ("", "| rate in the same round | times |", "| --- | --- |")
    gloo = {f"{_RATES[name]} / socket": values for name, values in llama["to_socket"].items()}
    for name, values in (llama["rates"] | gloo).items():
        yield f"| {name} | {_cell(values, 2)} |"
    yield from _linked(found["linked"])
    yield from (
        "",
        f"The plan for Kimi-K2's shapes ({kimi['parameters'] / 1e12:.2f}T parameters) on 1,024 trainer ranks and 512",
    )
    yield "engine ranks; what travels is the lower bound of the transfer:"
    yield from ("", "| wire | all, ms | one rank, ms | TB in all |", "| --- | --- | --- | --- |")
    for name, words in (("direct", "group"), ("stored", "files")):
        row = kimi[name]
        yield f"| {words} | {1e3 * row['all']:.0f} | {1e3 * row['one']:.1f} | {row['bytes'] / 1e12:.2f} |"


def _linked(found: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "The loopback has no limit of its own: four ranks on two cores are as fast as their processor time, where"
    yield "packing, many small messages and a version's agreement count in full. Between hosts the link is the limit."
    yield f"The same with trainer and engine on two emulated hosts, over a link of {found['link'] // 1000} Gbit/s:"
    yield from ("", "| method | milliseconds | of the socket's rate |", "| --- | --- | --- |")
    for name in ("socket", *_RATES):
        rate = found["to_socket"].get(name)
        milliseconds = [1e3 * value for value in found["seconds"][name]]
        yield f"| {_WORDS[name]} | {_cell(milliseconds, 0)} | {_cell(rate, 2) if rate else ''} |"


def _cell(values: Sequence[float], digits: int) -> str:
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f} – {high:.{digits}f})"
