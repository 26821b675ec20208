# ruff: noqa: E501
"""Scripts that are run with recorders for their launchers: what they start, what they may do, and that they end."""

import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rankmesh import PlanError
from rankmesh.cli.app import app
from rankmesh.core import recipes
from rankmesh.readers import run_config
from rankmesh.readers.recording import record as recording
from rankmesh.readers.recording.record import record, sandbox_kind

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="runs bash")


def works(kind):
    """Whether this machine has this sandbox."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.sh"
        script.write_text("torchrun x", encoding="utf-8")
        return len(record(script, kind=kind).launches) == 1


SANDBOXES = [kind for kind in ("namespaces", "bubblewrap") if works(kind)]
KINDS = ["none", *SANDBOXES]
sandboxed = pytest.mark.skipif(SANDBOXES == [], reason="this machine allows no sandbox")
RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py "
TP = RUN + "--tensor-model-parallel-size "


def run(path, arguments=(), *, sandbox=(*SANDBOXES, "none")[0], **others):
    """The plan of a script that runs in the strongest sandbox there is, or in this one."""
    return run_config(path, arguments, sandbox=sandbox, **{"seconds": 300, **others})


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that writes a script into the folder in which it then runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "TP"):
        monkeypatch.delenv(name, raising=False)

    def write(text, name="run.sh"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return Path(name)

    return write


FOLLOWED = [
    (TP + "$1", ["4"], recipes.megatron(8, tp=4)),
    ("if (( $# == 2 )); then TP=$(( $1 * 2 )); fi\n" + TP + "${TP%x}", ["2", "x"], recipes.megatron(8, tp=4)),
    ("set -- 2 8\nf() { local TP=$2; " + TP + "$TP; }\nf $@", [], recipes.megatron(8, tp=8)),
    ("source ./more.sh\n" + TP + "$MORE", [], recipes.megatron(8, tp=2)),
    (TP + "$(python -c 'print(2 * 2)')", [], recipes.megatron(8, tp=4)),
    (TP + "$(python - <<E\nprint(2)\nE\n)", [], recipes.megatron(8, tp=2)),
    ("for i in 0 1; do " + TP + "2 --node_rank $i > log.$i & done; wait", [], recipes.megatron(8, tp=2)),
    ("export PATH=/usr/bin:/bin\n" + TP + "2", [], recipes.megatron(8, tp=2)),
    ("python -m torch.distributed.launch --nproc_per_node=8 train.py --context-parallel-size=2", [], recipes.megatron(8, cp=2)),
    ("cat <<E >/dev/null\n" + TP + "8\nE\necho " + TP + "8\n" + TP + "2", [], recipes.megatron(8, tp=2)),
    ("srun -n 16 bash -c 'python pretrain_gpt.py --tensor-model-parallel-size $((SLURM_PROCID + 2))'", [], recipes.megatron(16, tp=2)),
    ("mpirun -np 16 ./inner.sh 4", [], recipes.megatron(16, tp=4)),
    ("#SBATCH -N 2\nsrun bash -c \"torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES " + TP.partition("8 ")[2] + '2"', [], recipes.megatron(16, tp=2)),
    ("sbatch -N 4 job.sh 2", [], recipes.megatron(32, tp=2)),
    ("sbatch <<E\n#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8\nsrun python pretrain_gpt.py --tensor-model-parallel-size 2\nE", [], recipes.megatron(16, tp=2)),
    ("ray job submit --address x -- torchrun --nproc_per_node 8 train.py --tensor-model-parallel-size 2", [], recipes.megatron(8, tp=2)),
    (TP + "2\npython tools/convert.py --load a", [], recipes.megatron(8, tp=2)),
    (TP + "2\ntorchrun --nproc_per_node 1 eval.py", [], recipes.megatron(8, tp=2)),
    ("WORLD_SIZE=16 python pretrain_gpt.py --tensor-model-parallel-size 2", [], recipes.megatron(16, tp=2)),
    (TP + '2 "$@"', ["--tensor-model-parallel-size", "4"], recipes.megatron(8, tp=4)),
    ("torchrun --nproc_per_node 4 " + TP.removeprefix("torchrun ") + "2 --nnodes 4", [], recipes.megatron(8, tp=2)),
    ("PET_NNODES=2 " + TP + "4", [], recipes.megatron(16, tp=4)),
    ("python3.12 -m torch.distributed.run --nproc_per_node 8 train.py --context-parallel-size=2", [], recipes.megatron(8, cp=2)),
    ("#SBATCH -N2\n#SBATCH -n64\nsrun -N2 -n16 python pretrain_gpt.py -n 4 --tensor-model-parallel-size 2", [], recipes.megatron(16, tp=2)),
    ("ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2", [], recipes.megatron(16, tp=2)),
]  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize(("text", "arguments", "plan"), FOLLOWED)
def test_whatever_bash_does_is_followed(script, text, arguments, plan):
    """Arguments, conditions, functions, files, computed values, launchers in launchers, jobs: the plan of the run."""
    script("MORE=2", "more.sh")
    script("python pretrain_gpt.py --tensor-model-parallel-size $1", "inner.sh")
    script("#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=h100:8\ntorchrun --nproc_per_node $SLURM_GPUS_PER_NODE "
           "--nnodes $SLURM_NNODES pretrain_gpt.py --tensor-model-parallel-size $1", "job.sh")  # fmt: skip
    assert run(script(text), arguments).plan == plan


ARGUMENTS = "--tensor-model-parallel-size 2"
# How a script finds the trainer's interpreter, beside its name in PATH.
LOGIN = [
    f'srun -n 8 bash -lc "python3 train.py {ARGUMENTS}"',
    f'mpirun -n 8 bash -lc "python3 train.py {ARGUMENTS}"',
    f'WORLD_SIZE=8 ray job submit -- bash -lc "python3 train.py {ARGUMENTS}"',
    f'WORLD_SIZE=8 bash -lc "python3 train.py {ARGUMENTS}"',
]
OTHERWISE = [
    f'srun -n 8 sh -lc "python3 train.py {ARGUMENTS}"',
    f"export PATH=/usr/bin:/bin WORLD_SIZE=8\nenv python3 train.py {ARGUMENTS}",
    f"WORLD_SIZE=8 {sys.executable} train.py {ARGUMENTS}",
    f"env -i PATH=/usr/bin:/bin WORLD_SIZE=8 $(command -v env) {sys.executable} train.py {ARGUMENTS}",
    f"WORLD_SIZE=8 sh -c 'exec {os.path.realpath(sys.executable)} train.py {ARGUMENTS}'",
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("text", "kind"), [(text, kind) for kind in KINDS for text in (LOGIN if kind == "none" else LOGIN + OTHERWISE)]
)
def test_the_trainer_never_runs(script, text, kind):
    """However a script finds the interpreter, what it would start is recorded, and its file is not executed."""
    script("raise SystemExit('runs for real')", "train.py")
    found = record(script(text), kind=kind)
    assert "for real" not in found.error
    assert [each.words[-2:] for each in found.launches] == [tuple(ARGUMENTS.split())]


@sandboxed
@pytest.mark.parametrize("kind", SANDBOXES)
def test_tools_written_in_python_run(script, kind, tmp_path_factory, monkeypatch):
    """A command of PATH whose first line names the interpreter answers the script, as on the cluster."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "size").write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps(4))\n", encoding="utf-8")
    (folder / "size").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert run(script(TP + "$(size)"), sandbox=kind).plan == recipes.megatron(8, tp=4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_inner_shell_that_ends_early(script, kind):
    """A launcher whose shell starts nothing is no run with default sizes: the message has the command that failed."""
    script(f"srun bash -c 'set -e; cd /not/there; {TP}2'")
    with pytest.raises(PlanError, match=r"started no launcher.*cd: /not/there"):
        run(Path("run.sh"), sandbox=kind, world_size=32)


def test_variables_and_a_world_size(script):
    """--set is the environment of the script; --world-size overrules a count, which may be this machine's."""
    path = script("torchrun --nproc_per_node ${N:-2} pretrain_gpt.py --tensor-model-parallel-size $TP")
    assert run(path, variables={"TP": "2", "N": "4"}).plan == recipes.megatron(4, tp=2)
    config = run(path, variables={"TP": "2"}, world_size=16)
    assert config.plan == recipes.megatron(16, tp=2)
    assert str(config) == (
        "run.sh: read as a run of this script\nrun.sh: --tensor-model-parallel-size = 2 (tp)\n"
        "run.sh: --nproc_per_node 2 = 2 is what the script found on this machine; --world-size 16 counts"
    )


def test_a_size_that_is_given_again(script):
    """The last counts, as for the program, and a note says so."""
    config = run(script(TP + "2 --tensor-model-parallel-size 4"))
    text = "--tensor-model-parallel-size = 2 is given again; --tensor-model-parallel-size = 4 counts"
    assert config.notes == ((0, text),)


def test_several_launches(script):
    """Launches of different layouts are listed, and --launch chooses one; of one layout they are one."""
    text = TP + "2\ntorchrun --nproc_per_node 1 eval.py\n" + TP + "4"
    with pytest.raises(PlanError, match=r"2 runs of different layouts \(1: torchrun .* 2; 3: torchrun .* 4\); choose"):
        run(script(text))
    assert run(script(text), launch=3).plan == recipes.megatron(8, tp=4)
    verl = "python -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 "
    verl += "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2\n"
    assert run(script(verl + "torchrun --nproc_per_node 1 eval.py")).plan == recipes.megatron(8, tp=2)
    with pytest.raises(PlanError, match="2 runs of different layouts"):
        run(script(verl + TP + "4"))
    with pytest.raises(PlanError, match="launch 4 of 3; choose one of 1 to 3"):
        run(script(text), launch=4)


REFUSED = [
    ("echo gone >&2; exit 3", r"started no launcher \(exit status 3, and its last words are: gone\); give it the arg"),
    ("python tools/convert.py", "started python tools/convert.py, which is not training"),
    (TP + "$NONE", "--tensor-model-parallel-size = true; .*whole number"),
    pytest.param("for i in $(seq 300); do " + TP + "2; done", "starts 200 launchers or more",
                 marks=pytest.mark.nightly),
    (RUN + "--tensor-model 2", "is the beginning of --tensor-model-parallel-size"),
    ("#SBATCH -N 4 --ntasks-per-node 8\nsrun -N 2 python pretrain_gpt.py --context-parallel-size 2",
     "give --world-size"),
    ("torchrun --nproc_per_node $NONE --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size 2",
     "--nproc_per_node has no value; give --world-size"),
    ("axolotl train a.yaml", "if a.yaml states the layout, give that file, with --world-size"),
    ("torchrun train.py a.yaml", "it names a.yaml"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_starts_no_training_is_refused(script, text, message):
    """The error says what the script did, and its last words."""
    with pytest.raises(PlanError, match=message) as caught:
        run(script(text))
    assert ":0:" not in str(caught.value)


def test_what_a_size_may_depend_on_is_noted(script):
    """Lines that failed, and programs that did not run while the script took their output."""
    notes = run(script("X=$(python tools/count.py)\nnonesuch\n" + TP + "2")).notes
    assert notes == (
        (2, "bash: nonesuch: command not found"),
        (0, "python tools/count.py did not run, so its output is empty"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left(script, kind, tmp_path, tmp_path_factory, monkeypatch):
    """Processes in the background, those that leave the session too, end with the script; so do our folders."""
    mark = f"RANKMESH_TEST_MARK={tmp_path}"
    place = tmp_path_factory.mktemp("place")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    path = script("sleep 600 &\nsetsid sleep 600 &\n(setsid sleep 600 &) \n" + TP + "2")
    began = time.monotonic()
    found = record(path, variables=dict([mark.split("=")]), kind=kind)
    assert len(found.launches) == 1
    assert time.monotonic() - began < 100
    time.sleep(0.1)
    assert [name for name in Path("/proc").glob("[1-9]*") if mark.encode() in _environment(name)] == []
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_in_the_folder_of_temporary_files(script, kind, tmp_path, monkeypatch):
    """What is recorded is found where our own folder is below that of the script, which it may write to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(script(TP + "2 > log || " + TP + "2"), sandbox=kind).plan == recipes.megatron(8, tp=2)


def _environment(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_does_not_end(script, kind):
    """The script is stopped at its limit; what it had started by then is read, with a note."""
    text = TP + "2\nwhile true; do sleep 0.1; done"
    config = run(script(text), sandbox=kind, seconds=5)  # a loaded machine starts a sandbox in a second
    assert config.plan == recipes.megatron(8, tp=2)
    assert config.notes == ((0, "the script was stopped after 5 s; later launches are not recorded"),)
    with pytest.raises(PlanError, match=r"was stopped after 0\.5 s, and started no training by then"):
        run(script("sleep 60"), sandbox=kind, seconds=0.5)


def test_a_script_that_prints_without_end(script):
    """A file grows to 16 MiB and no further; the program that writes it ends."""
    config = run(script("yes > out; yes; stat -c %s out >&2\n" + TP + "2"))
    assert config.plan == recipes.megatron(8, tp=2)


@pytest.mark.parametrize(
    ("command", "why"),
    [("mkfifo", "is a FIFO"), ("ln -s /dev/zero", "is a device"), ("echo [] >", "has values of another kind")],
)
def test_a_script_that_forges_a_note(script, command, why):
    """A FIFO, a link to a device and a list among the notes of what a script starts: refused, at once."""
    with pytest.raises(PlanError, match=f"a note of what the script starts {why}"):
        run_config(script(f"{TP}2\n{command} $RANKMESH_RECORD/1"))


@pytest.mark.skipif(shutil.which("pkill") is None, reason="cleans up as scripts do")
@pytest.mark.parametrize("kind", SANDBOXES)
def test_a_script_that_cleans_up(script, kind):
    """A script that kills every Python first kills none of ours: it has processes of its own."""
    config = run(script("pkill -9 python; pkill -9 -f nonesuch; sleep 0.2\n" + TP + "2"), sandbox=kind)
    assert config.plan == recipes.megatron(8, tp=2)


def test_the_sandbox_that_is_chosen():
    """Namespaces come before bubblewrap, and none is said to be none."""
    assert sandbox_kind() == (*SANDBOXES, "none")[0]


@pytest.mark.skipif("namespaces" not in SANDBOXES, reason="this machine allows no namespaces")
def test_the_sandbox(script, tmp_path, tmp_path_factory):
    """No file changes, what is written is thrown away, and no address is reached."""
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text("as it was", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = (
            f"echo x > {outside}; rm -f {outside}; echo here > here\n[ -f here ] && A=2\n"
            "echo x > /usr/rankmesh-test && A=8\n"
            f"if (echo > /dev/tcp/127.0.0.1/{port}); then A=8; fi\nmount -o remount,rw / && A=8\n" + TP + "$A"
        )
        assert run(script(text), sandbox="namespaces").plan == recipes.megatron(8, tp=2)
        script_outside = run(script(text), sandbox="none", variables={"A": "2"})
    assert script_outside.plan == recipes.megatron(8, tp=8)
    assert not outside.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "run.sh"]


@pytest.mark.skipif("namespaces" not in SANDBOXES, reason="this machine allows no namespaces")
def test_a_script_writes_where_it_likes(script, tmp_path_factory):
    """A script that ends at its first error may write anywhere that it could; what is mounted below stays visible."""
    outside = tmp_path_factory.mktemp("outside")
    places = [outside / "logs", Path.home() / "rankmesh-test-outputs", Path("/tmp/rankmesh-test-outputs")]  # noqa: S108
    text = "set -e\n" + "".join(f"mkdir -p {place}/a; echo 2 > {place}/a/size\n" for place in places)
    text += f"ls -d {' '.join(_mounts())} > mounts\n"
    config = run(script(text + TP + f"$(cat {outside}/logs/a/size)"), sandbox="namespaces")
    assert config.plan == recipes.megatron(8, tp=2)
    assert config.notes == ()
    assert not any(place.exists() for place in places)


def _mounts():
    """What is mounted on this machine, without what belongs to the kernel, and what a sandbox hides."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    return [path for _, path, *_ in lines if not path.startswith(("/proc", "/sys", "/dev", "/run", "/tmp"))]  # noqa: S108


REACHES = """\
import os, socket
def reached(path, family=socket.AF_UNIX):
    try:
        with socket.socket(family) as one:
            one.settimeout(5)
            one.connect(path)
        return True
    except OSError:
        return False
def written(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return True
    except OSError:
        return False
places = [place for place in os.environ["PLACES"].split(":") if place]
found = [place for place in places if reached(place.replace("@", chr(0)))]
found += [place for place in os.environ["FILES"].split(":") if place and written(place)]
found += [place for place in places if place.startswith("/") and os.environ["HERE"] not in place and os.path.exists(place)]
print("\\n".join(found) or "none")
"""


@pytest.fixture
def host(tmp_path, tmp_path_factory):
    """What a script may find on a machine: Unix sockets by path and by name, FIFOs that somebody reads."""
    with ExitStack() as stack:
        folders = [path for path in ("/run", "/tmp", tmp_path_factory.mktemp("other")) if os.access(path, os.W_OK)]  # noqa: S108
        sockets, files = [], []
        for folder in [*folders, tmp_path]:
            at = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="rankmesh-test-")))
            sockets.append(str(at / "socket"))
            if folder != tmp_path:
                files.append(str(at / "fifo"))
                os.mkfifo(files[-1])
                stack.callback(os.close, os.open(files[-1], os.O_RDWR))
        sockets.append(f"@rankmesh-test-{os.getpid()}")
        for path in sockets:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(path.replace("@", "\0"))
            server.listen(16)
        yield {"PLACES": ":".join(sockets), "FILES": ":".join(files), "HERE": str(tmp_path)}


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
@pytest.mark.parametrize("kind", KINDS)
def test_sockets_of_the_machine(script, host, kind):
    """A sandboxed script connects to no Unix socket, in /run, /tmp, its own folder or by name, and sees none of them."""
    script(REACHES, "reaches.py")
    path = script('torchrun "$(python3 -c "$(cat reaches.py)")"\n')
    (launch,) = record(path, variables=host, kind=kind).launches
    if kind != "none":
        assert launch.words == ("torchrun", "none")
    else:
        assert {*launch.words[1].split("\n")} == {*host["PLACES"].split(":"), *host["FILES"].split(":")}


@pytest.mark.skipif(not hasattr(socket, "AF_VSOCK"), reason="VSOCK is Linux's")
@pytest.mark.parametrize("kind", SANDBOXES)
def test_sockets_that_no_namespace_contains(script, kind):
    """A sandboxed script makes IP sockets, which reach nothing, and no others: VSOCK reaches the machine below."""
    code = "import socket; socket.socket(); socket.socketpair(); print(2, end=str())\nsocket.socket(socket.AF_VSOCK); print(0)"
    assert run(script(TP + f"$(python3 -c '{code}')"), sandbox=kind).plan == recipes.megatron(8, tp=2)


@pytest.mark.parametrize("kind", SANDBOXES)
def test_devices_and_the_kernel(script, kind):
    """A sandboxed script has harmless devices, and changes no setting of the kernel, as root neither."""
    refused = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"]
    text = "".join(f"(exec 3>>{path}) && A=8\n" for path in refused)
    text += "for file in /dev/kmsg /dev/mem /dev/fuse /dev/net/tun /dev/pts/0; do [ -c $file ] && A=8; done\n"
    text += "echo x > /dev/null || A=8; head -c 1 /dev/urandom >/dev/stdout | cat || A=8; echo > /dev/shm/x || A=8\n"
    text += '[ -z "$(find /dev -xdev -type b)" ] || A=8\n'
    assert run(script("A=2\n" + text + TP + "$A"), sandbox=kind).plan == recipes.megatron(8, tp=2)


def show(*arguments):
    """One ``rankmesh show`` in this process, whose standard input is no terminal."""
    return CliRunner().invoke(app, ["show", *map(str, arguments)], prog_name="rankmesh")


@sandboxed
def test_show_run(script):
    """It is said what will run; without a terminal --yes is needed; arguments and options go to the script."""
    path = script('[ "$2" = --big ] && TP=$1\n' + TP + "$TP")
    refused = show("--run", path, "4", "--", "--big")
    assert refused.exit_code == 2
    assert "recorded and do not run: torchrun, srun, mpirun" in refused.stderr
    assert "no terminal to ask whether it may; add --yes\n" in refused.stderr
    done = show("--run", path, "-y", "--json", "4", "--", "--big")
    assert done.exit_code == 0, done.stderr
    assert '{"line": null, "key": "--tensor-model-parallel-size"' in " ".join(done.stdout.split()).replace("{ ", "{")


@pytest.fixture
def no_sandbox(monkeypatch):
    """A machine that allows no sandbox."""
    monkeypatch.setattr(recording, "_works", lambda kind: kind == "none")


def test_a_script_that_would_run_for_real(script, no_sandbox, monkeypatch):
    """Without a sandbox --yes is not enough: the mode is named, or the question, which says it, is answered."""
    path = script("touch mark\n" + TP + "2")
    for words, status, message in (
        (["-y"], 2, "--yes would run 'run.sh' for real; to run it so, add --sandbox none"),
        ([], 2, "WITHOUT a sandbox, and there is no terminal to ask whether it may; add --yes --sandbox none"),
        (["-y", "--sandbox", "bubblewrap"], 3, "does not allow the sandbox bubblewrap; choose none"),
        (["-y", "--sandbox", "chroot"], 3, "'chroot' is not known; choose namespaces, bubblewrap, none"),
    ):
        refused = show("--run", path, *words)
        assert refused.exit_code == status
        assert message in " ".join(refused.stderr.replace("│", " ").split())
    with pytest.raises(PlanError, match="allows no sandbox, so the script would run for real; name sandbox none"):
        run_config(path)
    monkeypatch.setattr("rankmesh.cli.script_run.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    asked = CliRunner().invoke(app, ["show", "--run", str(path)], input="n\n")
    assert asked.exit_code == 2
    assert "Run it for real, WITHOUT a sandbox, with all that it does to this machine? [y/N]" in asked.stderr
    assert not Path("mark").exists()
    assert CliRunner().invoke(app, ["show", "--run", str(path)], input="y\n").exit_code == 0
    assert Path("mark").exists()
    Path("mark").unlink()
    done = show("--run", path, "-y", "--sandbox", "none")
    assert done.exit_code == 0, done.stderr
    assert "bash runs this script, WITHOUT a sandbox, FOR REAL" in done.stderr
    assert Path("mark").exists()


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("vllm serve ./model --tensor-parallel-size 2\n", recipes.vllm(tp=2)),
        ("srun -N 2 bash -c 'vllm serve org/model -tp 8 --pipeline-parallel-size 2'\n", recipes.vllm(tp=8, pp=2)),
        ("if true; then sglang serve model --tp 4; fi\n", recipes.sglang(tp=4)),
        ("NPROC_PER_NODE=4 llamafactory-cli train sft.yaml\n", recipes.accelerate(4, dp_replicate=4, dp_shard=1)),
    ],
)
def test_a_word_that_is_no_option_has_no_line_in_a_recorded_run(script, text, plan):
    """A model or a config that a recorded command names is read as one of a script is."""
    script("model_name_or_path: m\n", "sft.yaml")
    assert run(script(text)).plan == plan
