"""Fetch the others' releases from the package index, each into a folder: ``python -m tests.peers.fetch DIR``.

Without their dependencies: what is compared is arithmetic of ranks and groups, and its imports are few.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Every release of megatron-core from the oldest that the drop-ins follow to the newest.
MEGATRON = ("0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0",
            "0.18.2", "0.19.0", "0.19.2")  # fmt: skip
OTHERS = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "nanotron": "0.4",
    "pytest-mock": "3.15.1",  # for Megatron's own tests
    "sglang": "0.5.23",
    "torchtitan": "0.3.0",
    "vllm": "0.33.0",
}
RELEASES = (*(("megatron-core", version) for version in MEGATRON), *OTHERS.items())

# Of a wheel of hundreds of megabytes, what is compared.
KEPT = {"vllm": "vllm/distributed", "sglang": "sglang/srt"}

# What a release imports that the tests have not, in its folder.
BESIDE = {"deepspeed": ("hjson==3.1.0", "msgpack==1.2.4", "psutil==7.2.2", "py-cpuinfo==9.0.0", "tqdm==4.70.1")}

# What vLLM, SGLang and transformers import to construct and load a model, without the engines' kernels; and mbridge,
# which loads into Megatron-Core. One folder.
ENGINES = (
    "mbridge==0.15.1",
    "transformers==5.23.0",
    f"vllm=={OTHERS['vllm']}",
    f"sglang=={OTHERS['sglang']}", "dill==0.4.1",
    "accelerate==1.15.0", "aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "anthropic==2.12.0",
    "anyio==4.16.0", "apache-tvm-ffi==0.1.15.post2", "astor==0.8.1", "blake3==1.0.11", "cachetools==8.0.1",
    "cbor2==6.3.0", "cloudpickle==3.1.2", "compressed-tensors==0.20.0", "depyf==0.20.0", "diskcache==5.6.3",
    "distro==1.9.0", "fastapi==0.165.0", "frozenlist==1.8.0", "gguf==0.19.0", "h11==0.16.0", "hf-xet==1.8.0",
    "httpcore==1.0.9", "httpcore2==2.16.2", "httpx==0.28.1", "httpx2==2.16.2", "huggingface_hub==2.4.0",
    "ijson==3.6.0", "interegular==0.3.3", "jiter==0.19.0", "lark==1.3.1", "llguidance==1.9.1", "llvmlite==0.50.0",
    "lm-format-enforcer==0.11.3", "loguru==0.7.3", "mcp==2.3.0", "mistral_common==1.13.1",
    "model-hosting-container-standards==0.1.16", "msgspec==0.22.0", "multidict==7.2.1", "numba==0.68.1",
    "openai==3.54.0", "openai-harmony==0.0.8", "opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2",
    "opentelemetry-semantic-conventions==0.66b2", "orjson==3.13.0", "outlines_core==0.2.14",
    "partial-json-parser==0.2.1.1.post7", "prometheus_client==0.26.0", "prometheus-fastapi-instrumentator==8.1.0",
    "propcache==0.5.4", "py-cpuinfo==9.0.0", "pybase64==1.5.1", "pycountry==26.2.16", "pydantic-settings==2.16.3",
    "python-dotenv==1.2.4", "python-json-logger==4.2.0", "python-multipart==0.0.34", "regex==2026.11.15",
    "sentencepiece==0.2.3", "setproctitle==1.3.8", "sniffio==1.3.1", "starlette==1.10.0", "tiktoken==0.14.0",
    "tokenizers==0.23.3", "tqdm==4.70.1", "truststore==0.10.5", "uvicorn==0.54.0", "uvloop==0.23.0",
    "watchfiles==1.3.0", "xgrammar==0.2.8", "yarl==1.25.1",
)  # fmt: skip

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
    if have == list(ENGINES):
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
    for wanted in RELEASES:
        fetch(*wanted, sys.argv[1])
    fetch_engines(sys.argv[1])
