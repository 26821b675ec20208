"""``rankmesh lint`` of Dockerfiles, Compose files, manifests: the line of each flag, pods and GPUs, no false alarm."""

import json

import pytest
from tests.lint.test_lint import codes

from rankmesh.readers.tokens import shown
from rankmesh.readers.tools.containers import read_containers
from rankmesh.readers.tools.lint import lint_files, lint_text

SERVE = "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 3"
TRAIN = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 3"


DOCKERFILES = [
    ('CMD ["vllm", "serve", "Qwen/Qwen3-8B", \\\n  "--tensor-parallel-size", "3"]\n', ("heads", 3, "tp=2")),
    (f"ENTRYPOINT exec {SERVE}\n", ("heads", 2, "tp=2")),
    ('ENTRYPOINT ["vllm", "serve"]\n\nCMD ["Qwen/Qwen3-8B", "--tensor-parallel-size=3"]\n', ("heads", 4, "tp=2")),
    (f'ENTRYPOINT ["/bin/bash", "-c", "set -e; {SERVE}"]\n', ("heads", 2, "tp=2")),
    (f"RUN --mount=type=cache,target=/x \\\n  # why\n  pip install . && \\\n  {TRAIN}\n", ("sizes", 5, "tp=2")),
    ("ENV TP=3 \\\n    PP=1\nCMD " + TRAIN.replace("3", "$TP") + "\n", ("sizes", 4, "tp=2")),
    ("ENV TP 3\nCMD " + TRAIN.replace("3", "${TP}") + "\n", ("sizes", 3, "tp=2")),
    ("AS base\nENV TP=3\nFROM base\nCMD " + TRAIN.replace("3", "$TP") + "\n", ("sizes", 4, "tp=2")),
]


@pytest.mark.parametrize(("text", "expected"), DOCKERFILES)
def test_dockerfile(text, expected):
    """Exec and shell form, continued lines, variables, and stages over others."""
    for name in ("Dockerfile", "docker/Dockerfile.gpu", "train.dockerfile"):
        assert codes(f"FROM image{' ' if text.startswith('AS') else chr(10)}{text}", name) == [expected]


COMPOSE = [
    (f"command: {SERVE}", ("heads", 3, "tp=2")),
    (f'command: ["sh", "-c", "{SERVE}"]', ("heads", 3, "tp=2")),
    ("command:\n      - vllm\n      - serve\n      - Qwen/Qwen3-8B\n      - --tensor-parallel-size=3",
     ("heads", 7, "tp=2")),
    ("command: >-\n      vllm serve Qwen/Qwen3-8B\n      --tensor-parallel-size ${TP:-3}", ("heads", 5, "tp=2")),
    ("environment: [TP=3]\n    command: sh -c 'exec vllm serve Qwen/Qwen3-8B\n      -tp $$TP'",
     ("heads", 5, "tp=2")),
    ("environment: {TP: 3}\n    entrypoint: [vllm, serve]\n    command: [Qwen/Qwen3-8B, -tp, '$TP']",
     ("heads", 5, "tp=2")),
    ("image: vllm/vllm-openai:latest\n    command: --model Qwen/Qwen3-8B -tp 3", ("heads", 4, "tp=2")),
    ("command: vllm serve m -tp 4\n    deploy: {resources: {reservations: {devices: [{count: 2}]}}}",
     ("gpus", 3, "tp=2")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), COMPOSE)
def test_compose(text, expected):
    """Commands as lists and texts, variables of lists and mappings, the entrypoint of vLLM's image, devices."""
    assert codes(f"services:\n  a:\n    {text}\n", "compose.yaml") == [expected]


def manifest(kind, spec, command, limits="{}"):
    """A manifest whose container is at line 5."""
    containers = f"[{{command: {command}, resources: {{limits: {limits}}}}}]"
    pod = "{spec: {containers: \n  " + containers + "}}"
    return f"apiVersion: v1\nkind: {kind}\nspec: {spec}\n".replace("POD", pod)


TORCHRUN = json.dumps(["torchrun", "--nnodes", "3", "train.py"])
PODS = [
    ("Job", "{parallelism: 2, completions: 2, template: POD}", 2),
    ("StatefulSet", "{replicas: 2, template: POD}", 2),
    ("JobSet", "{replicatedJobs: [{replicas: 2, template: {spec: {parallelism: 2, template: POD}}}]}", 4),
    ("PyTorchJob", "{pytorchReplicaSpecs: {Master: {replicas: 1, template: POD}}}", 1),
    ("LeaderWorkerSet", "{replicas: 3, leaderWorkerTemplate: {size: 2, workerTemplate: POD}}", 2),
]


@pytest.mark.parametrize(("kind", "spec", "pods"), PODS)
def test_pods(kind, spec, pods):
    """A launcher is told another number of nodes than a kind makes pods; with that number there is no finding."""
    text = manifest(kind, spec, TORCHRUN)
    assert codes(text, "a.yaml") == [("nodes", 4, f"--nnodes {pods}")]
    assert codes(text.replace('"3"', f'"{pods}"'), "a.yaml") == []
    assert codes(f"kind: ConfigMap\n---\n{text}", "a.yaml") == [("nodes", 6, f"--nnodes {pods}")]


def test_pods_that_are_not_counted():
    """A Job of one pod may be one of several documents, an elastic job has any number; a run of one node is in each."""
    for kind, spec, _ in PODS[:3]:
        assert codes(manifest(kind, spec, TORCHRUN.replace("3", "1")), "a.yaml") == []
    elastic = PODS[3][1].replace("{pytorch", "{elasticPolicy: {}, pytorch")
    for kind, spec in (("Job", "{parallelism: 1, template: POD}"), ("Pod", "{template: POD}"), ("PyTorchJob", elastic)):
        assert codes(manifest(kind, spec, TORCHRUN), "a.yaml") == []


def test_gpus():
    """A container has fewer GPUs than its launcher starts ranks, or its engine needs on all of its nodes."""
    two, spec = "{nvidia.com/gpu: 2}", "{template: POD}"
    launched = manifest("Job", spec, "[torchrun, --nproc-per-node=4, a.py]", two)
    assert codes(launched, "a.yaml") == [("gpus", 4, "--nproc-per-node 2")]
    serve = "[vllm, serve, m, -tp, '4', -pp, '2']"
    assert codes(manifest("Deployment", spec, serve, two), "a.yaml") == [("gpus", 4, "tp=1")]
    group = "{leaderWorkerTemplate: {size: SIZE, workerTemplate: POD}}"
    for size, found in (("2", [("gpus", 4, "tp=2")]), ("4", [])):
        assert codes(manifest("LeaderWorkerSet", group.replace("SIZE", size), serve, two), "a.yaml") == found
    of_ray = serve.replace("m,", "m, --distributed-executor-backend, ray,")
    assert codes(manifest("Deployment", spec, of_ray, two), "a.yaml") == []


def test_variables_of_kubernetes():
    """A variable is its value; one that nobody sets is a finding, one that an image or a controller may set a note."""

    def container(env, argument, kind="Deployment"):
        args = f"    args: [--model=Qwen/Qwen3-8B, -tp, {argument}]\n"
        return f"kind: {kind}\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    env: {env}\n{args}"

    assert codes(container("[{name: TP, value: '3'}]", "$(TP)"), "a.yaml") == [("heads", 6, "tp=2")]
    assert codes(container("[]", "$(TP)"), "a.yaml") == [("unset-variable", 6, None)]
    for text in (
        container("[{name: TP, valueFrom: {fieldRef: {}}}]", "$(TP)"),
        container("[]", "$(LWS_GROUP_SIZE)", "LeaderWorkerSet"),
        "kind: Pod\nspec:\n  containers:\n  - command: [sh, -c, 'vllm serve m -tp $TP']\n",
    ):
        found = lint_text(text, "a.yaml")
        assert (found.findings, len(found.notes)) == ((), 1)


def test_blocks_have_the_lines_of_the_file():
    """The words of a text in a manifest have the lines on which they are written."""
    text = """\
kind: Pod
spec:
  containers:
    - env: [{name: N, value: "2"}]
      command: ["/bin/bash", "-c"]
      args:
        - |
          # start
          torchrun --nproc_per_node $(N) \\
            --host $(hostname) a.py \\
            --tensor-model-parallel-size 4
"""
    (found,) = read_containers(text, "a.yaml")
    (command,) = found.script.commands
    assert [(shown(word), word[0].lines[0]) for word in command.words] == [
        ("torchrun", 9), ("--nproc_per_node", 9), ("2", 9), ("--host", 10), ("$(hostname)", 10), ("a.py", 10),
        ("--tensor-model-parallel-size", 11), ("4", 11),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["{{ .Values.x }}\ncommand: vllm serve -tp 3\n", "command: don't run vllm\n", "args: {vllm: 3}\ncommand: null\n",
     "a: &a {command: vllm}\nb: {<<: [*a, *a]}\n", "command: ['']\nargs: ['', sh, -c]\n# vllm\n"],
)  # fmt: skip
def test_what_is_no_command_has_no_findings(text):
    """Templates, texts that are not shell, empty words and mappings are passed."""
    assert lint_text(text, "a.yaml").findings == ()


def test_folders(tmp_path):
    """Dockerfiles of a folder are checked."""
    for name in ("Dockerfile", "a.Dockerfile", "Containerfile.cuda"):
        (tmp_path / name).write_text(f"FROM a\nCMD {SERVE}\n")
    assert [found.line for found in lint_files([tmp_path]).findings] == [2, 2, 2]


def test_images_of_vllm():
    """An image of vLLM, by an argument too, starts `vllm serve`; an ENTRYPOINT resets the CMD of the stage before."""
    command = 'CMD ["Qwen/Qwen3-8B", "-tp", "3"]\n'
    named = f"ARG BASE=vllm/vllm-openai:v1\nFROM $BASE AS first\n{command}"
    assert codes(named, "Dockerfile") == [("heads", 3, "tp=2")]
    again = f'FROM vllm/vllm-openai AS first\nFROM first\n{command}ENTRYPOINT ["vllm", "serve"]\n'
    assert codes(again, "Dockerfile") == [("heads", 3, "tp=2")]
    reset = f'FROM a AS first\n{command}FROM first\nENTRYPOINT ["vllm", "serve"]\n'
    assert codes(reset, "Dockerfile") == []
    assert codes(f"FROM other\n{command}", "Dockerfile") == []


@pytest.mark.parametrize("name", ["Dockerfile", "a.yaml"])
def test_a_file_of_very_many_commands_is_refused_soon(name):
    """Instructions and containers of one file are limited."""
    line = "RUN vllm\n" if name == "Dockerfile" else "- {command: vllm}\n"
    found = lint_text(line * 10_000, name)
    assert (found.findings, len(found.notes)) == ((), 1)


DYNAMO = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    decode:
      multinode: {nodeCount: %d}
      resources: {limits: {gpu: "%d"}}
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.%s]
          args: [%s]
"""
KSERVE = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_id=m, --tensor-parallel-size=%d]
      resources: {limits: {nvidia.com/gpu: "4"}}
"""
LWS = """\
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
          - command: [sh, -c, "multi-node-serving.sh leader; vllm serve m -tp 8 --pipeline-parallel-size %d"]
            resources: {limits: {nvidia.com/gpu: "8"}}
"""
WIDE = '--model, m, --data-parallel-hybrid-lb, --tensor-parallel-size, "1", --data-parallel-size, "16"'
ATTENTION = '--model-path, m, --tp, "8", --dp, "8", --enable-dp-attention, --ep-size, "8"'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DYNAMO % (1, 8, "vllm", WIDE), [("gpus", 11, "dp=8")]),
        (DYNAMO % (2, 8, "vllm", WIDE), []),
        (DYNAMO % (1, 8, "vllm", WIDE + ', --data-parallel-size-local, "8"'), []),
        (DYNAMO % (1, 4, "sglang", ATTENTION), [("gpus", 11, None)]),
        (DYNAMO % (1, 8, "sglang", ATTENTION), []),
        (KSERVE % 8, [("gpus", 7, "tp=4")]),
        (KSERVE % 4, []),
        (LWS % 4, [("gpus", 9, "tp=4")]),
        (LWS % 2, []),
    ],
)
def test_engines_of_operators(text, expected):
    """Dynamo, KServe and LeaderWorkerSet give a container GPUs, and nodes, that its engine's ranks may not fit."""
    assert codes(text, "a.yaml") == expected


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (DYNAMO % (1, 4, "trtllm", '--tensor-parallel-size, "8"'), "TensorRT-LLM"),
        (KSERVE.replace("huggingface", "custom") % 8, "a.yaml:7: --tensor-parallel-size is of a program"),
        ("apiVersion: serving.kserve.io/v1alpha1\nkind: LLMInferenceService\nspec:\n  parallelism:\n    tensor: 8\n",
         "parallelism of a manifest of kind LLMInferenceService is not read"),
    ],
)  # fmt: skip
def test_what_is_not_read_of_a_manifest_is_a_note(text, noted):
    """An engine or a kind that states sizes and is not read is named; nothing is silently passed."""
    found = lint_text(text, "a.yaml")
    assert (found.findings, len(found.notes)) == ((), 1)
    assert noted in found.notes[0]
