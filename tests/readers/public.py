"""Public launch scripts and configs against what bash and YAML make of them; run by hand over a checkout.

    python -m tests.readers.public CHECKOUT...            right, refused or wrong, file by file, and the sums
    python -m tests.readers.public --write CHECKOUT...    the same, and the list tests/readers/public.txt anew

Scripts run under recorders, in a sandbox only. What is expected is taken from the recorded words here, by names and
launcher counts written down anew, and from YAML by a plain merge. A script that starts no run with a parallel size,
because it needs arguments or files of a cluster, states no layout here and is left out. A checkout without a repository
has its commit in a file COMMIT; the name of its folder is OWNER+NAME.
"""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import lcm, prod
from os import chdir
from pathlib import Path

import yaml

from rankmesh import PlanError
from rankmesh.errors import RankmeshError
from rankmesh.readers import read_config, run_config
from rankmesh.readers.recording.record import record, sandbox_kind

LIST = Path(__file__).with_name("public.txt")
SECONDS = 10
NAMES = {
    "tp": ("tensor_model_parallel_size", "tensor_parallel_size", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size"),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size", "expert_parallel_size", "moe_expert_parallel_size"),
    "etp": ("expert_tensor_parallel_size",),
    "sp": ("ds_sequence_parallel_size", "ulysses_sequence_parallel_size"),
    "dp_shard": ("dp_shard_size",),
    "dp_replicate": ("dp_replicate_size",),
}
# Counted from YAML alone: as words of a command they are of an inference engine.
YAML_ONLY = ("tensor_parallel_size", "model_parallel_size", "expert_parallel_size")
SIZES = {name: axis for axis, names in NAMES.items() for name in names}
STATES = re.compile(r"--(tensor|pipeline|context|expert)[-_](model[-_])?parallel[-_]size|megatron\.tensor|ulysses_sequ")
POSITION = re.compile(r"^\s*(\w+)=\"?\$\{?(\d+)(?::-\w*)?\}?\"?\s*(?:#.*)?$", re.MULTILINE)


def arguments_of(text):
    """Arguments for a script that takes them by position: sizes of 2, and a plausible word for the others."""
    found = {int(number): name for name, number in POSITION.findall(text)}
    return [_argument(found.get(place, ""), text) for place in range(1, max(found, default=0) + 1)]


def _argument(name, text):
    if name == "ENV":
        return "dsw"
    if "MODEL_SIZE" in name:
        first = re.search(rf"\$\{{?{name}\}}?\"?\s*==?\s*\"?([\w.-]+)", text)
        return first[1] if first else "7B"
    if name in ("TP", "PP"):
        return "2"
    return "false" if name in ("SP", "DO", "FL", "TE", "MOE", "SFT", "PR_FL") else "1"


def options_of(words):
    """The options of a command, the last of each name, and its settings ``key=value``."""
    options = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            options[name.lstrip("-").replace("-", "_")] = value if equals else "" if after.startswith("--") else after
        elif equals and "." in name:
            options[name.lstrip("+")] = value
    return options


def sizes_of_words(words, environment):
    """The sizes and the world that a recorded command states, None where it states none."""
    options = options_of(words)
    verl = {name: value for name, value in options.items() if name.startswith("actor_rollout_ref.actor.")}
    if verl:
        wanted = ("megatron." if _is_megatron(words, options, verl) else "ulysses_sequence_parallel_size",)
        options = {
            **{name.rpartition(".")[2]: value for name, value in verl.items() if any(part in name for part in wanted)},
            "world": _times(options.get("trainer.nnodes"), options.get("trainer.n_gpus_per_node")),
        }
    sizes = {axis: options[name] for name, axis in SIZES.items() if name in options and name not in YAML_ONLY}
    if not sizes:
        return None
    world = options["world"] if verl else world_of(words, options, environment)
    kept = {axis: size for axis, size in sizes.items() if size not in ("null", "None")}
    return {**kept, **({"world": world} if world else {})}


def _is_megatron(words, options, verl):
    strategy = verl.get("actor_rollout_ref.actor.strategy", options.get("model_engine"))
    stated = any(".actor.megatron." in name and name.endswith("parallel_size") for name in verl)
    return strategy == "megatron" if strategy else stated or any("megatron" in word for word in words[:5])


def world_of(words, options, environment):
    """The ranks that the launcher in these words starts, None if they do not say."""
    line = " ".join(words[:60])
    if words[0] in ("megatron", "swift"):
        return _times(environment.get("NPROC_PER_NODE"), environment.get("NNODES", "1"))
    if re.search(r"(^|\s)(\S*/)?torchrun\s|torch\.distributed\.(run|launch)", line):
        each = options.get("nproc_per_node")
        return _times(each, options.get("nnodes", "1")) if each is not None else None
    if "msrun" in line:
        return _times(options.get("worker_num"))
    if re.search(r"(^|\s)deepspeed\s", line):
        return _times(options.get("num_gpus"), options.get("num_nodes"))
    if re.search(r"(^|\s)srun\s", line):
        one = options.get("n", options.get("ntasks"))
        return (
            _times(one)
            or _times(options.get("N", options.get("nodes")), options.get("ntasks_per_node"))
            or _times(environment.get("SLURM_NTASKS"))
        )
    if re.search(r"(^|\s)mpi(run|exec)\s", line):
        return _times(options.get("n", options.get("np")))
    return _times(environment.get("WORLD_SIZE"))


def _times(*counts):
    """The product of counts as text, None if one is missing, empty for one that is no number above 0."""
    if None in counts:
        return None
    whole = [int(count) for count in counts if str(count).isdecimal() and int(count) > 0]
    return str(prod(whole)) if len(whole) == len(counts) else None


def sizes_of_script(path, text, kind):
    """The layouts that a script starts, each once, and its arguments."""
    words = arguments_of(text)
    found = []
    with suppress(PlanError):
        for launch in record(path, words, kind=kind, seconds=SECONDS).launches:
            sizes = sizes_of_words(launch.words, launch.environment)
            if sizes and sizes not in found:
                found.append(sizes)
    return found, words


def sizes_of_yaml(path):
    """The layout that a YAML states by a key of its own system, None if it states none."""
    with suppress(yaml.YAMLError, OSError, UnicodeError, AttributeError, TypeError, KeyError, ValueError):
        data = merged(path)
        policy = data.get("policy")
        if isinstance(policy, dict) and {"megatron_cfg", "dtensor_cfg"} & set(policy):
            engines = [name for name in ("megatron_cfg", "dtensor_cfg") if (policy.get(name) or {}).get("enabled")]
            return None if len(engines) != 1 else {**named(policy[engines[0]]), **cluster(data, policy)}
        top = {key.replace("-", "_"): value for key, value in data.items()}
        if "pipe_parallel_size" in top or "model_parallel_size" in top:
            kept = {key: max(1, value) for key, value in top.items() if SIZES.get(key) in ("tp", "pp")}
            return named(kept)
        if ("base_model" in top or "model_name_or_path" in top) and any(key in SIZES for key in top):
            return named(top)
    return None


def merged(path):
    """A YAML over the parents that it names, NeMo-RL's way."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    parents = data.pop("defaults", [])
    whole = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        whole = over(whole, merged(path.parent / parent))
    return over(whole, data)


def over(below, above):
    """One mapping over another."""
    both = dict(below)
    for key, value in above.items():
        both[key] = over(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def named(section):
    """The sizes of a mapping by their axes."""
    return {SIZES[key]: str(value) for key, value in section.items() if key in SIZES and value is not None}


def cluster(data, policy):
    """The world where training and generation share the cluster."""
    rollout = (policy.get("generation") or {}).get("colocated") or {}
    counts = data.get("cluster") or {}
    if rollout.get("enabled") is False or not {"num_nodes", "gpus_per_node"} <= set(counts):
        return {}
    return {"world": str(counts["num_nodes"] * counts["gpus_per_node"])}


def possible(sizes):
    """Whether a system would take these sizes: numbers, of which the world is a multiple."""
    if not all(str(size).isdecimal() and int(size) > 0 for size in sizes.values()):
        return False
    number = {axis: int(size) for axis, size in sizes.items()}
    model = prod(number.get(axis, 1) for axis in ("tp", "pp", "cp", "sp"))
    experts = number.get("ep", 1) * number.get("etp", number.get("tp", 1)) * number.get("pp", 1)
    return "world" not in number or (number["world"] % model == 0 and number["world"] % experts == 0)


def outcome(expected, read):
    """``right``, ``refused`` or ``wrong``: what rankmesh makes of a file of these layouts."""
    sizes = expected[0]
    number = [int(size) for axis, size in sizes.items() if axis != "world" and str(size).isdecimal()]
    world = None if "world" in sizes else lcm(*(size for size in number if size), prod(size or 1 for size in number))
    if "dp_shard" in sizes and world:
        world = prod(number)
    try:
        config = read(world)
    except RankmeshError:
        return "right" if not possible(sizes) else "refused"
    if not all(map(possible, expected)):
        return "wrong"
    given = {**config.arguments, "world": config.plan.world_size}
    return "right" if any(same(each, given) for each in expected) and len(expected) == 1 else "wrong"


def same(sizes, given):
    """Whether a config has these sizes; what it does not name is 1, or for experts what follows from the others."""
    return all(
        int(size) == given.get(axis, 1 if axis != "etp" else int(sizes.get("tp", 1))) for axis, size in sizes.items()
    )


def rows(checkout, kind):
    """Each file that states a layout: its path, its layouts, what running and what reading makes of it."""
    files = sorted(path for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts)
    scripts = [path for path in files if path.suffix in (".sh", ".slurm", ".sbatch")]
    chdir(checkout)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda path: script_row(path.relative_to(checkout), kind), scripts))
    for path in (path for path in files if path.suffix in (".yaml", ".yml")):
        sizes = sizes_of_yaml(path)
        if sizes:
            text = path.read_text(encoding="utf-8")
            how = outcome([sizes], lambda world, text=text, path=path: read_config(text, str(path), world_size=world))
            found.append((path.relative_to(checkout), [sizes], "-", how))
    return [row for row in found if row]


def script_row(path, kind):
    """The row of one script, None where it starts no run with a size."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not STATES.search(text):
        return None
    expected, words = sizes_of_script(path, text, kind)
    if not expected:
        return None
    if len(expected) > 1:  # which one is meant has to be chosen: refusing is right
        expected = [{"tp": "several"}]
    ran = outcome(expected, lambda world: run_config(path, words, world_size=world, sandbox=kind, seconds=SECONDS))
    return path, expected, ran, outcome(expected, lambda world: read_config(text, str(path), world_size=world))


def main():
    """Print the rows and the sums of the checkouts that are named; with --write also the list."""
    kind = sandbox_kind()
    if kind == "none":
        sys.exit("public scripts run in a sandbox only, and this machine has none")
    lines = []
    for checkout in [Path(name).resolve() for name in sys.argv[1:] if name != "--write"]:
        commit = subprocess.run(
            ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        lines.append(
            f"# {checkout.name.replace('+', '/')} {commit.stdout.strip() or (checkout / 'COMMIT').read_text().strip()}"
        )
        sums = Counter()
        for path, expected, ran, read in rows(checkout, kind):
            sizes = " ".join(f"{axis}={size}" for axis, size in expected[0].items())
            lines.append(f"{path}: {sizes}: {ran} {read}")
            sums[ran, read] += 1
            sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.write(f"{lines[0] if len(lines) == 1 else checkout.name}: run, read: {dict(sums)}\n")
    if "--write" in sys.argv:
        LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
