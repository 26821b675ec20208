"""Recordings made by hand, as torch's flight recorder writes them: one call a line."""

import gzip
import json
import pickle

from rankmesh.debug.doctor import recording_of

WORLD = ("0", "default_pg")


def call(group, number, operation="all_reduce", sizes=(4,), dtype="Float", *, done=True, backend="nccl", **other):
    """One entry; ``group`` is (name, description)."""
    return {
        "record_id": 0,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 10**18 + number * 10**6,
        "input_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "output_sizes": [list(sizes)],
        "output_dtypes": [dtype],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
        "frames": [],
        **other,
    }


def document(entries, groups, version="2.10", **about):
    """The whole of one rank; ``groups`` are the members by (name, description)."""
    for place, entry in enumerate(entries):
        entry["record_id"] = about.get("first", 0) + place
    config = {name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for (name, desc), ranks in groups.items()}
    local = {key: value for key, value in about.items() if key != "first"}
    return {"version": version, "pg_config": config, "entries": entries, **({"rankmesh": local} if local else {})}


def recordings(documents):
    """The recordings of documents by rank."""
    return {rank: recording_of(data, rank, f"rank{rank}") for rank, data in documents.items()}


def write(folder, documents, form="json"):
    """Files of these documents, as torch names them."""
    for rank, data in documents.items():
        text = json.dumps(data).encode()
        content = {"json": text, "pickle": pickle.dumps(data, protocol=2), "gzip": gzip.compress(text)}[form]
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
