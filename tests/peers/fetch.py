"""Fetch the others' releases from the package index, each into a folder: ``python -m tests.peers.fetch DIR [few]``.

Without their dependencies: what is compared is arithmetic of ranks and groups, and its imports are few.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# In one folder: vLLM, SGLang, transformers, mbridge, which loads into Megatron-Core, and what they import.
PINS = Path(__file__).parents[2] / "packages" / "rankmesh-engines" / "pins.txt"
ENGINES = [line for line in PINS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
_PINNED = dict(line.split("==") for line in ENGINES)

# Every release of megatron-core from the oldest that the drop-ins follow to the newest.
MEGATRON = ("0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0",
            "0.18.2", "0.19.0", "0.19.2")  # fmt: skip
OTHERS = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "nanotron": "0.4",
    "pytest-mock": "3.15.1",  # for Megatron's own tests
    "sglang": _PINNED["sglang"],
    "torchtitan": "0.3.0",
    "vllm": _PINNED["vllm"],
}
RELEASES = (*(("megatron-core", version) for version in MEGATRON), *OTHERS.items())
# What .ci/run compares with: the newest, and no engines, which are large.
FEW = tuple(
    (name, OTHERS.get(name, MEGATRON[-1]))
    for name in ("megatron-core", "accelerate", "deepspeed", "nanotron", "torchtitan")
)

# Of a wheel of hundreds of megabytes, what is compared.
KEPT = {"vllm": "vllm/distributed", "sglang": "sglang/srt"}

# What a release imports that the tests have not, in its folder.
BESIDE = {"deepspeed": ("hjson==3.1.0", "msgpack==1.2.4", "psutil==7.2.2", "py-cpuinfo==9.0.0", "tqdm==4.70.1")}

# A source release that asks this environment's torch how to be built, and is told to build no kernels.
BUILT = {"deepspeed": ("--no-build-isolation",)}


def folder(name, version=None, root=None):
    """Where a release lies; the only one, where there is one of a name."""
    version = version or OTHERS[name]
    return Path(root or os.environ["RANKMESH_PEERS"]).resolve() / f"{name}-{version}"


def engines():
    """The folder of vLLM, SGLang, transformers and mbridge."""
    return Path(os.environ["RANKMESH_PEERS"]).resolve() / "engines"


def trainers():
    """A search path with Megatron-Core, its loader, and the engines."""
    return f"{folder('megatron-core', MEGATRON[-1])}:{engines()}"


def fetch(name, version, root):
    """Install one release without its dependencies; one that is there stays."""
    place = folder(name, version, root)
    if place.exists():
        return
    unfinished = place.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # A release may say that it wants a newer Python than this one: what is compared runs on each.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
           "--ignore-requires-python", "--no-compile", "--target", str(unfinished)]  # fmt: skip
    subprocess.run([*pip, *BUILT.get(name, ()), f"{name}=={version}", *BESIDE.get(name, ())], check=True, timeout=600)
    if name in KEPT:
        shutil.move(unfinished / KEPT[name], unfinished / "kept")
        whole, unfinished = unfinished, unfinished.with_suffix(".kept")
        (unfinished / KEPT[name]).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(whole / "kept", unfinished / KEPT[name])
        shutil.rmtree(whole)
    unfinished.rename(place)


# Of the engines, what no test loads: kernels, servers, models of images.
UNUSED = ("vllm/**/*.so", "sglang/**/*.so", "sglang/multimodal_gen", "sglang/test")


def fetch_engines(root):
    """Install vLLM, SGLang, transformers and mbridge with what they import, in one folder; what is there stays."""
    place = Path(root).resolve() / "engines"
    listed = place / "fetched.txt"
    have = listed.read_text(encoding="utf-8").split() if listed.exists() else []
    if have == ENGINES:
        return
    if not set(have) < set(ENGINES):  # another release of something
        shutil.rmtree(place, ignore_errors=True)
        have = []
    unfinished = place.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
           "--no-compile", "--target", str(unfinished)]  # fmt: skip
    subprocess.run([*pip, *(one for one in ENGINES if one not in have)], check=True, timeout=1200)
    for path in [path for pattern in UNUSED for path in unfinished.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(unfinished, place, dirs_exist_ok=True)
    shutil.rmtree(unfinished)
    listed.write_text("\n".join(ENGINES), encoding="utf-8")


if __name__ == "__main__":
    all_of_them = sys.argv[2:] != ["few"]
    for wanted in RELEASES if all_of_them else FEW:
        fetch(*wanted, sys.argv[1])
    if all_of_them:
        fetch_engines(sys.argv[1])
