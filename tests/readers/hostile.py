# ruff: noqa: E501
"""Hostile inputs: mutations of valid files, and texts that take a reader long; the same ones for the same number."""

import json
import pickle
import random
import struct

NAMES = [
    "a", "tp", "parallelism", "hidden_size", "levels", "hosts", "shape", "cut", "mesh", "groups", "schema", "boxes",
]  # fmt: skip
VALUES = [
    "5", "-1", "1e999", "9" * 5000, "1000000000", "1000000000000000000000", "null", "true", '""', '"x"', "[]", "{}",
    "[[]]", '{"a": {}}', "[1]", '"tp=2"', "1.5", ".inf", "2001-13-45", "'\\ud800'", '"\\ud800"', '"\\u0000"', "<<",
    "*a", "&a [*a]", "!!python/object/apply:os.system [id]", "0x10", "0o17", "1:2:3", "~", "'*'", "n[1-100000]",
    "n[1-999999999]", "${TP}", "$((TP*TP))", "$(id)", "/dev/zero",
]  # fmt: skip
VALID = {
    "run.sh": "TP=4\nARGS=(\n  --tensor-model-parallel-size $TP\n  --num-layers 2 --hidden-size 64\n)\n"
    "if [ -n \"$X\" ]; then ARGS+=(--recompute-activations); fi\nfor i in 1 2; do echo $i; done\n"
    "torchrun --nproc_per_node 8 --nnodes ${NNODES:-2} pretrain_gpt.py ${ARGS[@]} \"${ARGS[@]}\" || exit 1\n",
    "nanotron.yaml": "parallelism:\n  dp: 2\n  tp: 4\n  pp: 2\n  tp_mode: REDUCE_SCATTER\nmodel: &m {a: 1}\nb: {<<: *m}\n",
    "megatron.yaml": "model_parallel:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\nworld_size: 8\n",
    "titan.toml": "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[training]\nsteps = 10\n",
    "ds.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}',
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n"
    "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
    "model.json": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
    '"intermediate_size": 128, "vocab_size": 100, "n_shared_experts": 1, "moe_intermediate_size": 8}',
    "model.yaml": "layers: 2\nhidden: 64\nheads: 4\nvocabulary: 100\nbatch: 8\nsequence: 128\n",
    "cluster.yaml": "levels:\n- {name: host}\n- {name: leaf, uplink: 1.0e+9}\nhosts:\n"
    '- {name: "n[1-2]", devices: 4, leaf: a}\n- {name: n3, devices: 2, leaf: b}\n',
    "topology.conf": "SwitchName=s1 Nodes=node[1-2] LinkSpeed=100\nSwitchName=s2 Nodes=node[3,10]\n"
    "SwitchName=top Switches=s[1-2]\n",
    "blocks.conf": "BlockName=b1 Nodes=node[1-2]\nBlockName=b2 Nodes=node[3-4]\nBlockSizes=2,4\n",
    "links.conf": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t0-47\n",
    "inside.yaml": "levels: [{name: pix}, {name: host, bandwidth: 1.0e+9}, {name: leaf, default: true}]\n"
    "hosts: [{name: 'n[1-2]', devices: 4, pix: [0, 0, 1, 1], leaf: a}]\n",
    "topology.yaml": "- topology: racks\n  tree:\n    switches:\n    - {switch: top, children: 's[1-2]'}\n"
    "    - {switch: s1, nodes: 'node[1-2]'}\n    - {switch: s2, nodes: node3}\n",
    "nodes.json": '{"kind": "List", "items": [{"kind": "Node", "metadata": {"name": "n1", "labels": '
    '{"topology.kubernetes.io/zone": "z"}}, "status": {"capacity": {"nvidia.com/gpu": "8"}}}]}',
    "aws.json": '{"Instances": [{"InstanceId": "i-1", "InstanceType": "p5.48xlarge", "NetworkNodes": ["a", "b", "c"]}]}',
    "switches.json": '{"n1": "s1", "n2": "s2"}',
    "traffic.json": '{"tp": [{"collective": "all-reduce", "bytes": 1048576, "times": 4}]}',
    "tensors.json": '{"up": {"shape": [8, 4], "dtype": "bfloat16", "source": {"cut": ["tp", null], "at": {"pp": 1}}, '
    '"target": {"cut": [null, "tp"], "parts": {"0": [4, 4]}}}}',
    "plan.json": '{"schema": 1, "mesh": {"axes": [["tp", 2], ["dp", 2]], "offset": 0}, "groups": [{"name": "tp", '
    '"axes": ["tp"], "options": {"timeout": 60}}], "world_size": 4}',
    "nccl.yaml": "tp: {max_ctas: 8}\ndp: {min_ctas: 4, net_name: IB}\n",
    "rankmesh.json": '{"schema": 1, "about": {}, "tensors": {"w": {"shape": [4], "dtype": "float32", "boxes": '
    "[[0, [[0, 2]]], [1, [[2, 4]]]]}}}",
    "rank3.json": '{"version": "2.4", "rank": 3, "entries": [{"record_id": 1, "pg_id": 0, "process_group": ["0", "tp"], '
    '"collective_seq_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "output_sizes": [[4]], '
    '"state": "scheduled", "time_created_ns": 1, "frames": []}]}',
}  # fmt: skip


def valid():
    """The valid files by name, as bytes."""
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    binary = {
        "model.safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
        ".metadata": pickle.dumps({"a": (1, [2], "x"), "b": {3: None}}),
    }
    return {**{name: text.encode() for name, text in VALID.items()}, **binary}


def _mutated(choose, data):
    """Some bytes of a file cut out, said twice, swapped, or replaced by a value or a name."""
    for _ in range(choose.randint(1, 4)):
        start = choose.randrange(len(data) + 1)
        stop = min(len(data), start + choose.choice([0, 1, 3, 8, 40]))
        value, name = choose.choice(VALUES).encode(), choose.choice(NAMES).encode()
        new = choose.choice([b"", data[start:stop] * 2, value, name, bytes([choose.randrange(256)])])
        data = data[:start] + new + data[stop:]
        if choose.random() < 0.1:
            data = data[:start]
    return data


def _replaced(choose, data):
    """A JSON document with one of its values replaced, or one of its keys."""
    document = json.loads(data)
    inner, places = [document], []
    while inner:
        one = inner.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        places += [(one, key) for key in keys]
        inner += [one[key] for key in keys if isinstance(one[key], dict | list)]
    holder, key = choose.choice(places)
    wrong = [
        5, -1, None, True, "", "x", [], {}, [[]], {"a": {}}, [1], 1.5, 10**9, 10**30, "tp", [None], "\ud800", "9" * 99,
    ]  # fmt: skip
    holder[key] = choose.choice(wrong)
    return json.dumps(document).encode()


def _nested(choose, depth):
    """A text whose brackets open and hardly close, in the syntaxes of the readers."""
    sign = choose.choice([
        "[", "{", "{a: ", '{"a":', "- ", "? ", "(", "$(", "${A:-", "$((1+", "A=(", "if x; then ", "((", '"$(', "f() {\n",
        "[[ a\n", "{,", "$[", "A=1 ",
    ])  # fmt: skip
    start = choose.choice(["", "a: ", "a = ", "tp=", "{", "#!/bin/bash\n"])
    return (start + sign * depth).encode()


def _grown(choose, depth):
    """A text that stands for much more than it says: aliases, merges, variables, functions, ranges."""
    lines = range(1, depth)
    kind = choose.randrange(9)
    if kind == 0:
        return "\n".join(["l0: &l0 [x,x]", *(f"l{n}: &l{n} [{','.join([f'*l{n - 1}'] * 10)}]" for n in lines)]).encode()
    if kind == 1:
        many = (f"l{n}: &l{n} {{<<: [{','.join([f'*l{n - 1}'] * 10)}]}}" for n in lines)
        return "\n".join(["l0: &l0 {tp: 1}", *many]).encode()
    if kind == 2:
        return (
            "#!/bin/bash\nA='x y'\n" + choose.choice(["A=$A$A\n", "A+=$A\n", 'A="$A $A"\n', "A+=($A $A)\n"]) * depth
        ).encode()
    if kind == 3:
        return ("#!/bin/bash\n" + "A=3\n" + "A=$((A*A))\n" * depth + "torchrun pretrain_gpt.py $A\n").encode()
    if kind == 4:
        calls = "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in lines)
        return f"#!/bin/bash\nf0() {{ A+=x; }}\n{calls}f{depth - 1}\n".encode()
    if kind == 5:
        branches = "if [ $X ]; then A=$A$B; else B=$B$A; fi\n" * depth
        return f"#!/bin/bash\nA=1\nB=2\n{branches}torchrun pretrain_gpt.py $A $B\n".encode()
    if kind == 6:
        return (".".join("ab"[n % 2] for n in range(depth * 200)) + " = 1\n").encode()
    if kind == 7:
        return (
            "\n" * depth * choose.choice([1, 1000]) + choose.choice(["x", "SwitchName=a Nodes=n[1-90000]"])
        ).encode()
    return "".join(f"key_{n}_parallel_siz: {n}\n" for n in range(depth * 500)).encode()


def inputs(count):
    """So many names and contents of files."""
    choose = random.Random(26)  # noqa: S311
    files = valid()
    for number in range(count):
        name = choose.choice(list(files))
        kind = number % 4
        if kind == 1 and name.endswith("json"):
            yield name, _replaced(choose, files[name])
        elif kind == 2 and number % 8 == 2:
            yield name, _nested(choose, choose.choice([3, 70, 300, 5_000]))
        elif kind == 3 and number % 8 == 3:
            yield name, _grown(choose, choose.choice([5, 20, 60]))
        else:
            yield name, _mutated(choose, files[name])
