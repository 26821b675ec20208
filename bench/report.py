"""The pages of figures: templates in ``bench/pages``, filled from the JSON files of this folder alone.

```
bench/pages/benchmarks.md ──┐
bench/*.json ── values() ───┴─> docs/benchmarks.md
```

A template has fields of ``str.format``: ``{cluster[link]}`` is a value of ``cluster.json``, ``{cluster_rows}`` a table
that a function below makes of it.

>>> seconds(0.00123), seconds(0.51), seconds(12.3), seconds(2.5e-7)
('1.23 ms', '510 ms', '12.3 s', '250 ns')
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["measured_rows", "page", "record", "seconds", "table"]

HERE = Path(__file__).parent
PAGES = {"benchmarks": HERE.parent / "docs" / "benchmarks.md", "hangs": HERE.parent / "docs" / "benchmarks_hangs.md"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_MIB = 2**20

Found = Mapping[str, Any]
Rows = Iterable[Sequence[object]]


def page(name: str, **given: Found) -> str:
    """Return the text of a page; ``given`` replaces what a JSON file has."""
    return (HERE / "pages" / f"{name}.md").read_text(encoding="utf-8").format(**_values(given))


def record(path: Path, found: Found) -> None:
    """Write the figures of a program; if they are the recorded ones, write the pages that show them again."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if path.parent == HERE:
        for name, document in PAGES.items():
            document.write_text(page(name), encoding="utf-8")


def _values(given: Mapping[str, Found]) -> dict[str, Any]:
    """Return the fields of the templates: each JSON file by its name, and what the functions below make of it."""
    found: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in HERE.glob("*.json")}
    found |= given
    made: dict[str, Any] = {}
    for maker in _MAKERS:
        name = maker.__name__.strip("_")
        made |= {f"{name}_{what}": text for what, text in maker(found[name]).items()}
    made |= {f"layouts_32_{what}": text for what, text in _layouts(found["layouts_32"]).items()}
    return found | made


def table(head: str, rows: Rows, align: str = "") -> str:
    """Format a Markdown table; ``head``: its columns with bars between; ``align``: an r for each column of numbers.

    >>> print(table("what|s", [("step", 1.5)], "lr"))
    | what | s |
    | --- | ---: |
    | step | 1.5 |
    """
    columns = head.split("|")
    rules = ["---:" if side == "r" else "---" for side in align.ljust(len(columns), "l")]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, rules, *rows))


def seconds(value: float) -> str:
    """Format seconds in the unit that suits them, three digits."""
    unit, name = next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])
    scaled = value / unit
    return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"


def _spread(values: Sequence[float], digits: int = 0, scale: float = 1.0) -> str:
    """Format the median of some values, the lowest and the highest."""
    middle, low, high = (f"{scale * value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low} – {high})"


def _stat(stat: Found, show: Callable[[float], str]) -> str:
    """Format a median with the lowest and the highest, where they differ."""
    middle, low, high = (show(stat[name]) for name in ("median", "low", "high"))
    return middle if stat["low"] == stat["high"] else f"{middle} ({low} – {high})"


# -- the suite: python -m bench ----------------------------------------------------------------------------------------


def _results(found: Found) -> dict[str, str]:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if name != "rankmesh")
    return {"versions": versions, **measured_rows(found)}


def measured_rows(found: Found) -> dict[str, str]:
    """Return the table of each section that has comparisons."""
    made = {}
    for section, maker in _SECTIONS.items():
        rows = [item for item in found["comparisons"] if item["section"] == section]
        made[section] = maker(rows) if rows else ""
    return made


def _live(found: Iterable[Found]) -> str:
    rows = []
    for item in found:
        for side, by in (("ours", "rankmesh"), ("theirs", item["peer"])):
            stats = item["both"][side]
            if side in item["failures"]:
                cells = (item["failures"][side], *["-"] * 5)
            else:
                counts = (f"{stats[name]['median']:g}" for name in ("descriptors", "threads", "store_operations"))
                faster = _ratio(item, "used") if side == "ours" else ""
                cells = (_stat(stats["built"], seconds), _stat(stats["used"], seconds), faster, *counts)
            rows.append((item["ranks"], item["what"], by, *cells))
    return table("ranks|groups|by|built|used|times faster|descriptors|threads|store operations", rows)


def _timed(what: str) -> Callable[[Iterable[Found]], str]:
    def side(item: Found, name: str) -> str:
        stats = item["both"][name]
        return item["failures"].get(name) or (_stat(stats[what], seconds) if what in stats else "-")

    def rows(found: Iterable[Found]) -> str:
        cells = []
        for item in found:
            both = (side(item, name) for name in ("ours", "theirs"))
            cells.append((f"{item['ranks']:,}", item["what"], *both, item["peer"], _ratio(item, what)))
        return table("ranks|what|rankmesh|peer|by|times faster", cells)

    return rows


def _ratio(item: Found, what: str) -> str:
    stat = item["both"]["ratios"].get(what)
    if stat is None:
        return "-"
    middle, low, high = (
        f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}" for ratio in (stat["median"], stat["low"], stat["high"])
    )
    return f"{middle} ({low} – {high})"


_SECTIONS: dict[str, Callable[[list[Found]], str]] = {
    "live": _live,
    "dry": _timed("built"),
    "planning": _timed("planned"),
    "getters": _timed("call"),
}

# -- programs of their own ---------------------------------------------------------------------------------------------

_METHODS = {
    "rankmesh": "rankmesh",
    "megatron": "Megatron-Core's resharding",
}


def _transfers(found: Found) -> dict[str, Any]:
    def mib(count: float) -> str:
        return f"{count / _MIB:.1f}"

    texts = []
    for case in found["cases"].values():
        fastest = case["methods"]["rankmesh"]["seconds"][0]
        rows = (
            (
                _METHODS[name],
                _spread(each["seconds"], 2),
                f"{each['seconds'][0] / fastest:.1f}",
                mib(each["wire"][0]),
                mib(each["memory"][0]),
            )
            for name, each in case["methods"].items()
            if name in _METHODS
        )
        texts.append(
            f"{case['title']}: {mib(case['whole'])} MiB of weights. The plan sends {mib(case['bytes'])} MiB; the least "
            f"possible is {mib(case['lower_bound'])}\nMiB\n"
            f"({case['rounds']} rounds; load {case['load'][0]:.1f} before, {case['load'][1]:.1f} after).\n\n"
            + table("by|seconds|times slower|MiB on the wire|MiB of memory", rows)
        )
    budget = found["settings"]["budget"] >> 20
    limits = (
        (
            row["kind"],
            row["ranks"],
            f"{row['bytes'] / 1e6:.1f}",
            *(f"{row[name][0] * 1e3:.0f}" for name in ("rankmesh", "limit")),
            _spread(row["ratio"], 2),
        )
        for row in found["limits"]
    )
    head = "the bytes|ranks|MB|rankmesh, ms|limit, ms|ratio"
    return {
        "cases": "\n\n".join(texts),
        "budget": budget,
        "megatron": found["versions"]["megatron-core"],
        "limits": table(head, limits),
    }


def _published(found: Found) -> dict[str, Any]:
    tables = {name: [row for row in found["rows"] if row["table"] == name] for name in ("main", "fsdp", "beyond")}
    main, fsdp = tables["main"], tables["fsdp"]
    near = {f"near{share}": _near(main, share) for share in (15, 20)} | {"fsdp_near": _near(fsdp, 20)}
    best = sum(1 <= row["rank"] <= 5 for row in main)
    counts = {"count": len(main), "fit": sum(row["rank"] > 0 for row in main), "best": best, "fsdp_count": len(fsdp)}
    texts = {"rows": _runs(main), "fsdp": _runs(fsdp), "beyond": _runs(beyond) if (beyond := tables["beyond"]) else ""}
    return near | counts | texts | _collectives(found["collectives"])


def _near(rows: Iterable[Found], percent: int) -> int:
    return sum(abs(row["ratio"] - 1) <= percent / 100 for row in rows)


def _collectives(rows: Sequence[Found]) -> dict[str, Any]:
    """Return the table of collectives, and how many are near: large ones within 30 %, small ones by a factor of 2."""
    ratios = [(row["bytes"] >= _MIB, row["predicted"] / row["seconds"]) for row in rows]
    large, small = ([ratio for big, ratio in ratios if big == which] for which in (True, False))
    cells = (
        (
            row["machine"],
            row["collective"],
            _bytes(row["bytes"]),
            seconds(row["seconds"]),
            seconds(row["predicted"]),
            f"{row['predicted'] / row['seconds']:.2f}",
            row["source"] + (f" ({row['note']})" if "note" in row else ""),
        )
        for row in rows
    )
    head = "devices|collective|size|published|predicted|ratio|source"
    return {
        "large": len(large),
        "large_near": sum(abs(ratio - 1) <= 0.3 for ratio in large),
        "small": len(small),
        "small_near": sum(0.5 <= ratio <= 2 for ratio in small),
        "collectives": table(head, cells, "llrrrrl"),
    }


def _bytes(size: float) -> str:
    scale = next((scale for scale in (30, 20, 10) if size >= 2**scale), 0)
    return f"{size / 2**scale:.4g} {dict(zip((30, 20, 10, 0), ('GiB', 'MiB', 'KiB', 'B'), strict=True))[scale]}"


def _runs(rows: Iterable[Found]) -> str:
    def cells(row: Found) -> Iterator[str]:
        yield from (row["name"], ",".join(f"{name}={size}" for name, size in row["sizes"].items()))
        yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["chosen"].items())
        yield from (f"{row['published']:.3g} s", f"{row['predicted']:.3g} s", f"{row['ratio']:.2f}")
        yield f"{row['rank']} of {row['fitting']}"
        yield f"{row['memory']:.1f}" + (f", {row['measured']:.1f}" if row["measured"] else "")
        yield row["source"]

    head = "run|sizes|left open|published|predicted|ratio|rank|memory, measured|source"
    return table(head, (tuple(cells(row)) for row in rows))


def _layouts(found: Found) -> dict[str, Any]:
    rows = found["rows"]
    ratios = sorted(row["predicted"] / row["measured"] for row in rows)
    loads = [load for row in rows for load in row.get("load", ())]
    cells = (
        (
            ",".join(f"{name}={row[name]}" for name in ("tp", "cp", "dp", "pp", "ep") if row[name] > 1),
            " ".join(row["order"]),
            row["microbatches"],
            f"{row['predicted']:.2f} s",
            f"{row['measured']:.2f} s",
            f"{row['predicted'] / row['measured']:.2f}",
        )
        for row in rows
    )
    head = "sizes|order, innermost first|microbatches|predicted|measured|ratio"
    return {
        "count": len(rows),
        "hosts": sum(map(len, found["racks"])),
        "racks": len(found["racks"]),
        "near10": sum(abs(ratio - 1) <= 0.1 for ratio in ratios),
        "near15": sum(abs(ratio - 1) <= 0.15 for ratio in ratios),
        "ratios": ", ".join(f"{ratio:.2f}" for ratio in ratios),
        "load": f"{min(loads):.1f} to {max(loads):.1f}",
        "shape": ", ".join(f"{name} {size}" for name, size in found["shape"].items()),
        "rows": table(head, cells, "llrrrr"),
    }


def _cluster(found: Found) -> dict[str, Any]:
    rows = (
        (name, placement, f"{found[name]['predicted'][placement] * 1e3:.0f} ms", f"{measured * 1e3:.0f} ms")
        for name in ("flat", "racks")
        for placement, measured in sorted(found[name]["measured"].items(), key=lambda item: item[1])
    )
    over = (f"{max(0.0, found[name]['placed']['over_best']):.1%} ({name})" for name in ("flat", "racks"))
    steps = (
        f"{row['seconds'] * 1e3:.0f} ms under {name} (predicted communication: {row['predicted'] * 1e3:.0f} ms)"
        for name, row in found["train"].items()
    )
    return {
        "sizes": ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items()),
        "rows": table("cluster|placement|predicted|measured", rows),
        "over": " and ".join(over),
        "slow": ", ".join(f"{each['slowed']}: {' '.join(each['named']) or 'none'}" for each in found["slow"]),
        "steps": len(next(iter(found["train"].values()))["losses"]) - 1,
        "trained": ", ".join(steps),
    }


def _gpu(found: Found) -> dict[str, Any]:
    def cells(item: Found, side: str) -> tuple[str, ...]:
        if side in item["failures"]:
            # Of an error of NCCL what is between the place in torch's source and the version.
            failure = item["failures"][side]
            return failure.partition(".cpp:")[2].partition(", ")[2].partition(" (")[0] or failure, "-", "-"
        stats = item["both"][side]
        times = (stats[name] for name in ("built", "used"))
        cells = (f"{time['median']:.3g} s ({time['low']:.3g} – {time['high']:.3g})" for time in times)
        return *cells, f"{stats['device_bytes']['median'] / _MIB:,.0f} MiB"

    rows = (
        (item["what"], item["ranks"], by, *cells(item, side))
        for item in found["comparisons"]
        for side, by in (("ours", "rankmesh"), ("theirs", item["peer"]))
    )
    return {
        "rows": table("groups|ranks|by|built|used|device memory", rows, "lrlrrr"),
        "tested": table("tests|passed|seconds", found["tests"]["rows"], "lrr"),
    }


_SYNCED = {
    "copy": "plain copy, on the trainer and then on the engine",
    "files": "rankmesh, shared memory: publish, then receive",
    "socket": "raw TCP sockets, no packing, one buffer",
    "gloo_plain": "gloo's own messages, no packing, one buffer",
    "gloo": "rankmesh, gloo",
}
_RATES = {"gloo_plain": "gloo's own messages", "gloo": "rankmesh, gloo"}


def _sync(found: Found) -> dict[str, Any]:
    llama, linked, kimi = found["llama"], found["linked"], found["kimi"]
    methods = (
        (words, _spread(llama["seconds"][name], scale=1e3), f"{llama['memory'][name] / 1e6:.0f}")
        for name, words in _SYNCED.items()
    )
    rates = llama["rates"] | {f"{_RATES[name]} / socket": values for name, values in llama["to_socket"].items()}
    limits = (
        (
            f"{row['bytes'] / 1e6:.1f}",
            *(f"{1e3 * row['processor'][name][0]:.0f}" for name in ("socket", *_RATES)),
            *(_spread(row["to_socket"][name], 2) for name in _RATES),
        )
        for row in found["limits"]
    )
    over_link = (
        (
            _SYNCED[name],
            _spread(linked["seconds"][name], scale=1e3),
            _spread(linked["to_socket"][name], 2) if name in linked["to_socket"] else "",
        )
        for name in ("socket", *_RATES)
    )
    plans = (
        (words, f"{1e3 * kimi[name]['all']:.0f}", f"{1e3 * kimi[name]['one']:.1f}", f"{kimi[name]['bytes'] / 1e12:.2f}")
        for name, words in (("direct", "group"), ("stored", "files"))
    )
    return {
        "megabytes": f"{llama['bytes'] / 1e6:.0f}",
        "methods": table("method|milliseconds|peak memory of a rank, MB", methods),
        "rates": table("rate in the same round|times", ((name, _spread(each, 2)) for name, each in rates.items())),
        "limits": table("MB|socket, ms|gloo's own, ms|rankmesh, ms|gloo's own / socket|rankmesh / socket", limits),
        "gigabits": linked["link"] // 1000,
        "linked": table("method|milliseconds|of the socket's rate", over_link),
        "parameters": f"{kimi['parameters'] / 1e12:.2f}",
        "plans": table("wire|all, ms|one rank, ms|TB in all", plans),
    }


def _survive(found: Found) -> dict[str, Any]:
    losses: dict[str, list[Found]] = {}
    for one in sorted(found["losses"], key=lambda one: str(one["how"])):
        losses.setdefault(one["how"], []).append(one)
    rows = (
        (how, len(some), _spread([one["seconds"] for one in some], 2), max(one["steps"] for one in some))
        for how, some in losses.items()
    )
    killed = [one["phases"] for one in losses["SIGKILL"]]
    phases = (_spread([one[name] for one in killed if name in one], scale=1e3) for name in killed[0])
    return {
        "rows": table("after|losses|seconds|steps done again", rows),
        "phases": table("|".join(killed[0]), [tuple(phases)]),
        "megabytes": f"{found['commit']['state'] / _MIB:.0f}",
        "commit": _commit(found["commit"]),
        "hold": _hold(found["hold"]),
        **_changes(found["changes"]),
    }


def _changes(found: Sequence[Found]) -> dict[str, str]:
    """Return the seconds of both ways to another layout, with the share of each phase, and the ratios of the times."""
    rows, ratios = [], []
    for size in found:
        whole = {way: [sum(phases.values()) for phases in rounds] for way, rounds in size["phases"].items()}
        again = [after / change for change, after in zip(whole["relayout"], whole["restart"], strict=True)]
        ratios.append(f"{min(again):.0f} to {max(again):.0f} times as long on {size['ranks']} ranks")
        for way, rounds in size["phases"].items():
            totals = list(zip(rounds, whole[way], strict=True))
            shares = {name: median([one[name] / total for one, total in totals]) for name in rounds[0]}
            phases = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            rows.append((str(size["ranks"]), way, f"{median(whole[way]):.1f}", phases))
    return {"changes": table("ranks|way|seconds|share by phase", rows), "restart": ", ".join(ratios)}


def _hold(found: Sequence[Found]) -> str:
    """Return processor times as multiples of one copy of what a rank holds, and peaks as multiples of its bytes."""
    rows = []
    for case in found:
        first, changed, same = case["epochs"]
        copies = [
            f"{epoch[call]['processor'] / epoch['copy']['processor']:.1f}"
            for epoch, call in ((first, "commit"), (changed, "hold"), (same, "hold"))
        ]
        read = f"{same['hold']['processor'] / same['read']['processor']:.1f}"
        # Before a change a rank keeps two snapshots of what it held then, which may be more.
        peaks = [
            epoch["peak"] / max(epoch["bytes"], before["bytes"]) for before, epoch in ((first, changed), (same, same))
        ]
        rows.append((case["ranks"], f"{same['bytes'] / _MIB:g}", *copies, read, *(f"{peak:.2f}" for peak in peaks)))
    head = "ranks|MiB|commit|hold after a change|hold, the same shards|that in reads|peak, change|peak, same shards"
    return table(head, rows, "rrrrrrrr")


def _commit(found: Found) -> str:
    wall, processor = found["seconds"], found["processor"]
    step, busy = wall["without"], processor["without"]

    def row(what: str, name: str, memory: str, less: float, sign: str) -> tuple[str, ...]:
        shares = (f"{time / whole - less:{sign}.1%}" for time, whole in ((wall[name], step), (processor[name], busy)))
        first, second = shares
        return what, f"{wall[name] * 1e3:.0f}", first, f"{processor[name] * 1e3:.0f}", second, memory

    copies = {name: f"{found['memory'][name] / found['state']:.1f} times the state" for name in ("commit", "copies")}
    rows = [
        ("a step without commit", f"{step * 1e3:.0f}", "", f"{busy * 1e3:.0f}", "", ""),
        row("the commit by itself", "commit alone", "", 0.0, ""),
        row("a step with commit", "commit", copies["commit"], 1.0, "+"),
        row("a step with commit, redundancy=1", "copies", copies["copies"], 1.0, "+"),
        row("a step with a guard, every=1", "guard", "", 1.0, "+"),
    ]
    return table("|ms|of a step|processor ms|of a step|snapshots and copies", rows)


_FORMS = {"pickle": "pickles", "json": "JSON", "gzip": "JSON, gzip"}
_SWITCHED = {
    "wall": "time of a step, with / without",
    "processor": "processor time of a step, with / without",
    "watch": "processor time of the watch's threads / of their ranks",
}
_OF_PAIRS = ("quartile", "low", "median", "high", "other_quartile")


def _hangs(found: Found) -> dict[str, Any]:
    step = found["step"]
    forms = (
        (
            _FORMS[form],
            f"{row['size'] / 2**30:.2f} GiB",
            f"{row['seconds']:.0f} s",
            f"{row['processor']:.0f} s",
            f"{row['memory'] / 2**30:.2f} GiB",
            f"{row['load']:.1f}",
        )
        for form, row in found["scale"]["forms"].items()
    )
    ratios = [("processor time of a small reduction", *(f"{ratio:.4f}" for ratio in step["call_ratio"]))]
    switch = found["switch"]
    costs = ((what, *(f"{switch[name][each]:.4f}" for each in _OF_PAIRS)) for name, what in _SWITCHED.items())
    without, watched = (step["alone"][what][1] * 1e3 for what in ("without", "with"))
    return {
        "forms": table("files|size|time|processor|memory|load before", forms),
        "call": f"{step['call']['without'] * 1e6:.1f} µs without, {step['call']['with'] * 1e6:.1f} µs with",
        "ratios": table("with / without|lowest|quartile|median|quartile|highest", ratios),
        "switch": table("ratio|quartile|95 % from|median|to|quartile", costs),
        "switch_step": f"{switch['step'] * 1e3:.1f}",
        "switch_load": " before, ".join(f"{load:.1f}" for load in switch["load"]) + " after",
        "adds": f"{watched - without:.1f} ms",
        "alone": f"{watched:.1f} with a watch, {without:.1f} without",
        "share": f"{(watched - without) / 10:.2f} %",
    }


_MAKERS: tuple[Callable[[Found], dict[str, Any]], ...] = (
    _results, _transfers, _published, _layouts, _cluster, _gpu, _sync, _survive, _hangs
)  # fmt: skip
