"""Launch scripts: the plain styles that people write, what has to run, and expansion as bash itself does it."""

import re
import shutil
import subprocess
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.limits import LONG

from rankmesh import PlanError
from rankmesh.core import recipes
from rankmesh.core.documents import Unreadable
from rankmesh.readers import read_config, source
from rankmesh.readers.script import read_script
from rankmesh.readers.tokens import text_of

RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py "
TP = RUN + "--tensor-model-parallel-size "


def lines_of(config):
    """Each argument with its line and the lines that its value comes from."""
    return {reading.argument: (reading.line, *reading.also) for reading in config.readings}


STYLES = [
    (TP + "'2'", recipes.megatron(8, tp=2), {"tp": (1,), "world_size": (1,)}),
    (RUN + "--tensor-model-parallel-size=2 --use-tp-pp-dp-mapping",
     recipes.megatron(8, tp=2, order="tp-cp-ep-pp-dp"), {"tp": (1,), "order": (1,), "world_size": (1,)}),
    (('A="--nproc_per_node 8 \\\n --nnodes 2"\nB="\n --tensor-model-parallel-size 2 \\\n"\n'
     "python -m torch.distributed.launch $A \\\n pretrain_gpt.py $B --save $1 2>&1 | tee log\n"),
     recipes.megatron(16, tp=2), {"tp": (4,), "world_size": (1, 2)}),
    ('N=4\nWORLD_SIZE=$(($N * 2))\nCMD="python pretrain_gpt.py --context-parallel-size 2"\n$CMD > log &\nwait',
     recipes.megatron(8, cp=2), {"cp": (3,), "world_size": (2, 1)}),
    ("TP=${TP:-4}\n" + TP + "$TP", recipes.megatron(8, tp=4), {"tp": (2, 1), "world_size": (2,)}),
    ("TP=2\nTP=4\n" + TP + "${TP}", recipes.megatron(8, tp=4), {"tp": (3, 2), "world_size": (3,)}),
    ("A=(--tensor-model-parallel-size 2)\nA+=(\n  --context-parallel-size 2 # two\n)\n" + RUN + '"${A[@]}"',
     recipes.megatron(8, tp=2, cp=2), {"tp": (1,), "cp": (3,), "world_size": (5,)}),
    ("srun -n 16 python pretrain_gpt.py --tensor-model-parallel-size 2", recipes.megatron(16, tp=2),
     {"tp": (1,), "world_size": (1,)}),
    ("srun -N 2 --ntasks-per-node 4 python pretrain_gpt.py --tensor-model-parallel-size 2",
     recipes.megatron(8, tp=2), {"tp": (1,), "world_size": (1,)}),
    ("#SBATCH -n64\nsrun -N2 -n16 python pretrain_gpt.py -n 4 --tensor-model-parallel-size 2",
     recipes.megatron(16, tp=2), None),
    (TP + "2 --nnodes 4", recipes.megatron(8, tp=2), None),
    ("PET_NNODES=2\n" + TP + "2", recipes.megatron(16, tp=2), None),
    ('A="--tensor-model-parallel-size 2"\n[ -f x ] && A="$A --bf16" && A="x$A"\n' + RUN + "--seed 1",
     recipes.megatron(8), None),
    ("if x; then LOG=a; EXTRA='--fp16'; fi\n" + TP + "2 --save $LOG $EXTRA", recipes.megatron(8, tp=2), None),
    (TP + "2 \\\n  --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
     recipes.megatron(8, tp=2, cp=4, hierarchical_cp=(2, 2)),
     {"tp": (1,), "cp": (2,), "hierarchical_cp": (2,), "world_size": (1,)}),
    ("cat > other.sh <<EOF\n" + TP + "8\nEOF\n# " + TP + "4\n" + TP + "2", recipes.megatron(8, tp=2),
     {"tp": (5,), "world_size": (5,)}),
    (("#SBATCH --nodes=2 --gpus-per-node=h100:8\nsrun torchrun --nproc_per_node=$SLURM_GPUS_PER_NODE \\\n"
     "--nnodes $SLURM_NNODES pretrain_gpt.py --tensor-model-parallel-size 2"), recipes.megatron(16, tp=2),
     {"tp": (3,), "world_size": (2, 1, 3)}),
    (("unset TP\nexport TP=2 X=3\nreadonly N=8\ntorchrun --nproc-per-node $N pretrain_gpt.py "
     "--tensor-model-parallel-size $TP"), recipes.megatron(8, tp=2), {"tp": (4, 2), "world_size": (4, 3)}),
    ("for i in 0 1; do\n" + TP + "2 --node_rank $i &\ndone\nwait", recipes.megatron(8, tp=2), None),
    ("if [ -d data ]; then\n" + TP + "2\nfi", recipes.megatron(8, tp=2), None),
    ('D="$(cd "$(dirname "$0")" && pwd)"\n' + TP + '2 --save "$D/out" $D/a', recipes.megatron(8, tp=2), None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "plan", "lines"), STYLES)
def test_the_ways_that_scripts_are_written(text, plan, lines):
    """Strings, arrays, functions, eval, bash -c, Slurm's directives: the plan, and the lines that it was read from."""
    config = read_config(text, "run.sh")
    assert config.plan == plan
    if lines is not None:
        assert lines_of(config) == lines


RUNS = "run it: rankmesh show --run run.sh"
SET = ".* is set in a branch, loop or function .line {}.; " + RUNS
# What is open, with the line and the reason; which statements leave a name open is tested against bash below.
REFUSED = [
    (TP + "$TP", ":1: --tensor-model-parallel-size = [$]TP; the variable TP has no value in this file"),
    (TP + "$1", ":1: .*the arguments of the script are not known here"),
    (TP + "$(nproc)", r":1: .*\$\(nproc\) is the output of a command; " + RUNS),
    (TP + "${TP%x}", ":1: .*more than a variable; " + RUNS),
    (TP + "two", ":1: .*whole number"),
    (TP, ":1: --tensor-model-parallel-size = true; .*whole number"),
    ("A=0\n" + TP + "$((4 / A))", ":2: .*is not read; " + RUNS),
    ("A=(--tensor-model-parallel-size 2)\n" + TP + "4 ${A[@]}",
     ":1: .*line 2 says --tensor-model-parallel-size = 4"),
    (TP + "2\n\n" + TP + "4", ":3: the script has 2 runs [(]line 1: torchrun .*line 3: torchrun"),
    ("if x; then\n" + TP + "2\nelse\n" + TP + "4\nfi", "the script has 2 runs"),
    ("for TP in 1 2; do\n" + TP + "$TP\ndone", ":2: " + SET.format(1)),
    ("M=()\nif x; then M=(--expert-model-parallel-size 2); fi\n" + TP + "2 ${M[@]}", ":2: [$].M.@.. = " +
     SET.format(2)),
    ("[ -f x ] && A='--context-parallel-size 2'\n" + TP + "2 --data x $A", ":1: .A = .*; " + RUNS),
    ("read TP\n" + TP + "$TP", ":2: .*TP is set by read TP .line 1.; " + RUNS),
    (TP + "2; echo 'unterminated\n" + TP + "4\n", r"is not read as shell: a quote does not end .line 1.; " + RUNS),
    ("A=<the size>\n" + TP + "2", "a redirection has no file .line 1.; " + RUNS),
    ("IFS=,\n" + TP + "2", "sets IFS, by which words end .line 1.; " + RUNS),
    ("go() {\n" + TP + "$1\n}\ngo 2", ":2: the run is in a function, which is not read; " + RUNS),
    ("run='" + TP + "2'\neval $run", ":2: the run is in the text of eval, which is not read; " + RUNS),
    ("srun -n 8 bash -c '" + TP + "2'", ":1: the run is in the text of bash -c, which is not read; " + RUNS),
    (TP + "2 $(cat args)", r":1: the arguments \$\(cat args\) may state sizes; .*; " + RUNS),
    (". env.sh\n" + TP + "2 ${ARGS[@]}", ":2: the arguments .* may state sizes; ARGS may be set by now: .*; " +
     RUNS),
    ("if x; then N=4; fi\ntorchrun --nproc_per_node 8 $N pretrain_gpt.py --tensor-model-parallel-size 2",
     "the options .N of torchrun are unknown: N.*; " + RUNS),
    (RUN + "--tensor-model-paralel-size 2 x", ":1: .*did you mean '--tensor-model-parallel-size'"),
    (RUN + "--sequence-parallel-size 2", ":1: .*looks like a parallel size"),
    (RUN + "--tensor-model 2", ":1: .*this is the beginning of --tensor-model-parallel-size; write the whole name"),
    (TP + "2 --encoder-tensor-model-parallel-size 2", ":1: .*a second mesh in the world"),
    (TP + "2 --use-mp-args-from-checkpoint-args", ":1: .*come from the checkpoint"),
    (TP + "2 --yaml-cfg a.yaml", ":1: .*give its path"),
    (TP + "3", "does not divide it"),
    ("torchrun --nproc_per_node $N pretrain_gpt.py --tensor-model-parallel-size 2",
     ":1: .*[$]N: the variable N .*give --"),
    ("torchrun --nproc_per_node 8 --nnodes 1:4 pretrain_gpt.py --tensor-model-parallel-size 2",
     "1:4, which is not a fixed"),
    ("torchrun --nproc_per_node 8 --nproc_per_node 4 pretrain_gpt.py", ":1: .*line 1 says --nproc_per_node = 8"),
    ("python pretrain_gpt.py --tensor-model-parallel-size 2", ":1: .*give --world-size"),
    ("#SBATCH -N 4 --ntasks-per-node 8\nsrun -N 2 python pretrain_gpt.py --context-parallel-size 2",
     ":2: .*give --world"),
    ("torchrun --nproc_per_node 8 train.py --config a.toml",
     ":1: .*the run has no argument of Megatron .it names --conf"),
    ("torchrun --nproc_per_node 8 train.py --hidden-size 8 --seq-length 8", "no argument of Megatron"),
    ("echo " + TP + "2", "starts no training in a plain line; " + RUNS),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_a_script_leaves_open_is_refused(text, message):
    """Variables without one value, branches, loops, several runs and contradictions name the line and a remedy."""
    with pytest.raises(PlanError, match=message) as caught:
        read_config(text, "run.sh")
    assert str(caught.value).startswith("run.sh")


@pytest.mark.parametrize(
    "statement",
    ['eval "$(echo TP=8)"', "eval `cat env`", "export $(grep -v '#' .env | xargs)", "export $VAR", "declare $NAME=8",
     "readonly $VAR", "source env.sh", ". ./env.sh", "source <(echo TP=8)", "command source env.sh",
     "if x; then source env.sh; fi"],
)  # fmt: skip
def test_what_can_set_a_size_is_refused(statement):
    """After a text that is not in the script may have set it, a size from a variable is refused, with --set too."""
    for before in ("TP=4\n", "A=(--tensor-model-parallel-size 4)\n"):
        run = TP + "$TP" if before.startswith("TP") else RUN + "${A[@]}"
        assert read_config(before + run, "run.sh").plan == recipes.megatron(8, tp=4)
        if before.startswith("A") and re.search(r"\bTP\b", statement) and "echo" not in statement:
            continue
        for variables in ({}, {"TP": "2"} if before.startswith("TP") else {}):
            with pytest.raises(PlanError, match=r"run.sh:\d+: .*; " + RUNS):
                read_config(before + statement + "\n" + run, "run.sh", variables=variables)


@pytest.mark.parametrize(
    "statement",
    ["source venv/bin/activate", "source /opt/conda/etc/profile.d/conda.sh", 'eval "$(conda shell.bash hook)"',
     "bash -c 'TP=8'", "bash env.sh", "x=$(source env.sh)", "export X=$VAR", "TP=8 true"],
)  # fmt: skip
def test_what_sets_no_size_is_read_over(statement):
    """Environments that are activated and other processes leave a size as it is; another file sets a default, too."""
    with pytest.raises(PlanError, match=r"TP may be set by now: source env.sh is not read .line 1.; " + RUNS):
        read_config("source env.sh\n" + TP + "${TP:-4}", "run.sh")
    config = read_config("source env.sh\nTP=4\n" + statement + "\n" + TP + "$TP", "run.sh")
    assert config.plan == recipes.megatron(8, tp=4)


@pytest.mark.parametrize(
    ("text", "variables", "plan"),
    [
        (TP + "$TP", {"TP": "2"}, recipes.megatron(8, tp=2)),
        (TP + "${TP:-4}", {"TP": "2"}, recipes.megatron(8, tp=2)),
        ("TP=4\n" + TP + "$TP $X", {"X": "a", "TP": "2"}, recipes.megatron(8, tp=4)),
        (TP + "2 --x $WORLD_SIZE", {"WORLD_SIZE": "3"}, recipes.megatron(8, tp=2)),
    ],
)
def test_given_variables(text, variables, plan):
    """What the environment holds beats a default, fills a variable without a value, and yields to an assignment."""
    assert read_config(text, "run.sh", variables=variables).plan == plan


@pytest.mark.parametrize(
    ("assignment", "line"), [("TP=4", True), ("TP=2", False), ("TP=${TP:-4}", False), ("true", False)]
)
def test_an_assignment_that_replaces_a_given_value_is_noted(assignment, line):
    """A variable that --set gives and the script sets to something else is the script's, with a note."""
    notes = read_config(assignment + "\n" + TP + "$TP", "run.sh", variables={"TP": "2"}).notes
    assert any("sets TP itself; --set TP is what it had before" in text for _, text in notes) == line


def test_given_variables_that_nobody_asks_for(tmp_path):
    """A name that the script does not use is a mistake, and so are variables for what is no script."""
    with pytest.raises(PlanError, match="does not ask for a variable TPP, which --set gives; did you mean TP"):
        read_config("TP=2\n" + TP + "$TP", "run.sh", variables={"TPP": "2"})
    for spec in ("tp=2,dp=4", "llama3-405b"):
        with pytest.raises(PlanError, match="which is not a launch script"):
            source.read(spec, variables={"TP": "2"})
    (tmp_path / "a.yaml").write_text("parallelism: {dp: 2, tp: 2, pp: 1}", encoding="utf-8")
    with pytest.raises(PlanError, match="a file that is not a script"):
        source.read(tmp_path / "a.yaml", variables={"TP": "2"})


@pytest.mark.parametrize(
    "script",
    [
        "N=${N:-1}\ntorchrun --nproc_per_node 8 --nnodes $N pretrain_gpt.py --tensor-model-parallel-size 2",
        "torchrun --nproc_per_node 8 --nnodes ${N:-1} pretrain_gpt.py --tensor-model-parallel-size 2",
        "W=$((${N:-1} * 8))\nmpirun -n $W python pretrain_gpt.py --tensor-model-parallel-size 2",
        "WORLD_SIZE=${WORLD_SIZE:-8}\npython pretrain_gpt.py --tensor-model-parallel-size 2",
    ],
)
def test_a_world_size_replaces_a_default(script):
    """--world-size counts where the script's own is the default of a variable, and the note says so."""
    assert read_config(script, "run.sh").plan.world_size == 8
    config = read_config(script, "run.sh", world_size=64)
    assert config.plan == recipes.megatron(64, tp=2)
    assert any("is a default; --world-size 64 counts" in text for _, text in config.notes)
    with pytest.raises(PlanError, match="but the world size is 64"):
        read_config("DIR=${DIR:-a} " + TP + "2 --save ${DIR:-a}", "run.sh", world_size=64)
    left_open = "torchrun --nproc_per_node $N pretrain_gpt.py --tensor-model-parallel-size 2"
    assert read_config(left_open, "run.sh", world_size=16).plan == recipes.megatron(16, tp=2)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (TP + "2 --$EXTRA", (1, "--$EXTRA is unknown; arguments that it adds are not read")),
        (TP + "2 $EXTRA", (1, "$EXTRA is unknown; arguments that it adds are not read")),
        (TP + '2 "$@"', (1, "$@ is unknown; arguments that it adds are not read")),
        (". env.sh\n" + TP + "2", (1, ". env.sh is another file; not read")),
        (TP + "${TP:-2}", (1, "${TP:-2} is read as its default; the environment may say otherwise")),
    ],
)  # fmt: skip
def test_what_is_not_read_is_listed(text, note):
    """Arguments that come from elsewhere, files and defaults of the layout are notes."""
    assert read_config(text, "run.sh").notes == (() if note is None else (note,))


ARGUMENTS = "# the run\n\n--tensor-model-parallel-size 2 \\\n--context-parallel-size=2 # two\n--save 'a b'\n"


def test_a_file_of_arguments():
    """Lines of arguments without a program are one run; the world size stands there, or is given."""
    config = read_config(ARGUMENTS + "--world-size 8\n", "args.txt")
    assert config.plan == read_config(ARGUMENTS, "args.txt", world_size=8).plan == recipes.megatron(8, tp=2, cp=2)
    assert lines_of(config) == {"tp": (3,), "cp": (4,), "world_size": (6,)}
    assert config.title == "a file of Megatron's arguments"
    for text, message in (
        (ARGUMENTS, "args.txt:1: .*give --world-size"),
        (ARGUMENTS + "--save 'a", "args.txt is not read as shell: a quote does not end .line 6."),
        ("--num-layers 2\n", "args.txt:1: .*the run has no argument of Megatron"),
    ):
        with pytest.raises(PlanError, match=message):
            read_config(text, "args.txt")


def test_nothing_is_executed(tmp_path):
    """A script that would write a file writes none."""
    mark = tmp_path / "mark"
    text = f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\neval 'touch {mark}'\n" + TP + "2"
    assert read_config(text, "run.sh").plan == recipes.megatron(8, tp=2)
    assert not mark.exists()


@given(st.text(alphabet="aA$ \n\"'`(){}[]=+-*:;|&<>#\\1@!", max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_read_or_refused(text):
    """No text makes anything but a PlanError."""
    with suppress(PlanError):
        read_config(text + "\n" + TP + "2", "run.sh")


NAMES = st.sampled_from("ABC")


def with_names(text, names):
    """A text with a name in the place of each @."""
    for name in names:
        text = text.replace("@", name, 1)
    return text


def filled(texts):
    """One of these texts, with names."""
    return st.builds(with_names, st.sampled_from(texts), st.lists(NAMES, min_size=4, max_size=4))


PIECES = st.one_of(
    st.sampled_from(["w", "4", "-f", "'q  r'", '"s  t"', "a\\;", "'$A'", '"\\$A"', "x#y", '"a\\b"', '"$"', "''"]),
    filled(["$@", "${@}", '"$@"', '"p ${@}  e"', "${@:-d e}", "${@-7}", '${@:-"f  g"}', '"${@:-f  $N}"']),
    NAMES.map('"${{{}[@]}}"'.format) | NAMES.map("${{{}[@]}}".format) | NAMES.map('"${{{}[*]}}"'.format),
    st.sampled_from(["$((3 * (N + 2)))", "$((N/2-5))", "$(($N % 4))", "$(( (2 - N) / 2 ))", "$(( (2 - N) % 4 ))"]),
)
WORD = st.lists(PIECES, min_size=1, max_size=2).map("".join)
PLAIN = st.one_of(
    st.builds("{}={}".format, NAMES, PIECES),
    st.builds("{}+={}".format, NAMES, st.sampled_from(["1", '" u"', "'v  w'"])),
    st.builds("{}=( {} )".format, NAMES, st.lists(WORD, max_size=3).map("\n  ".join)),
    st.builds("{}+=( {} )".format, NAMES, WORD),
    filled(["unset @", '@="1 \\\n  2\n3"', "export @=5", 'export @="6 7"', "export @=5 @=$@", "export @=7 @=$@"]),
    st.builds('{}={} {}="${}"'.format, NAMES, PIECES, NAMES, NAMES),
    st.builds("{}={} true".format, NAMES, PIECES),
)
# Statements of every kind; a name of A, B and C is put in the place of each @.
OTHERS = [
    "if true; then @=8; else @=8; fi", "if @=4; then @=5; fi", "if [ $@ = 8 ]; then unset @; fi",
    "if [ $@ = 8 ]; then @=1; elif [[ -z $@ ]]; then @=2; else C=3; fi", 'if cd /; then @="${@} --y"; fi',
    "if cd /none 2>/dev/null; then @+=( -q ); fi", "if [ $@ = 8 ] && @=2; then @=3; fi",
    "if @=2 && [ $@ = 8 ]; then @=3; fi", 'if [ "${@:=4}" = 4 ]; then @=3; fi',
    '[ -n "$@" ] && @="$@ --x"', "[ $N -gt 4 ] && ! [ $A == 7 ] || @=5", "[[ -n x && (a == a) ]] && @=3",
    "false && @=3 || @=4", "@=3 && @=4", "@=3 || @=4", "! @=4 || @=5", "{ @=4; } && (@=5) && @+=6",
    "for i in 1 2 3; do @=$@; @=6; done", "for @ in 1 2; do :; done", "for ((A = 0; A < 2; A++)); do @=5; done",
    'while [ -z "$W" ]; do @+=(4); W=1; done', 'until [ -n "$U" ]; do U=1; @=$@; done',
    "while read @; do @=5; done <<< '1 2'", "read @ <<< 5 && @=6", "X=@; read $X <<< 5",
    "case $@ in 8|9) @=1;; '') @=2;; esac && @=3", "case $N in 8) @=5;; 9) @=6;; *) A=7;; esac",
    "case $@ in 1|-*) @=5;; 'x y') @=6;; [4-9]) B=2;; *) A=7;; esac", "case $N in 9) @=5;;& *) @=6;; esac",
    "h() { @=7; return; }; h && @=8", "f() { local @=8 @; @=9; }; f", "g() { @=$@; }; @=3 g",
    "(@=8)", "@=8 | cat", "@=5 & wait", "bash -c '@=8'", "X=$((@ = 3))", "@=$(case x in x) echo 1;; esac)",
    "(( @ = 1 )) && @=2", "((@ = (N += 1), @++, N == 3))", "let @+=3", "let A=1 @+=3", "printf -v @ 8",
    'eval "@=$@"', 'eval "@=4 @=\\$N"', "@=3 eval '@=$@'", 'eval "$(echo @=5)"', "builtin eval '@=5'",
    ". /dev/stdin <<< @=5", "(. /dev/stdin <<< @=5)", "cat <<E >/dev/null\n@=5\n'\nE",
    'export "@=$@ q"', "export Z $X", "export Z $(echo A=5)", 'export Z "B=5"', "export Z $N", "export Z C",
    "X=@=5; declare $X", "X=@; unset $X", "declare -n R=@; R=5", "declare -i A=2+2", "readonly C=1; C=2", "local A=3",
    "@[1]='7'", "@[1]='x y'", "@[1]=''", "@=~", "@=x:~", "@=$'a\\tb'", "@=$[1+1]", "@=`echo 4`", "@=$((08))",
    "@=$((N++))", "@=*", "@='{1,2}'", "E=; A=1 $E", "E=; $E A=1 true",
    "IFS=x", "set -- 1 2", "exec 3>&1", "shopt -s nullglob", "trap 'A=1' EXIT", "exit",
]  # fmt: skip
ANY = st.one_of(PLAIN, *[filled(OTHERS)] * 20)


def from_bash(program, folder):
    """What bash passes to ``program``, None where it does not get there."""
    start = "program() { printf '%s\\0' program \"$@\"; }\n"
    shell = ["env", "-i", shutil.which("bash"), "--norc", "-c", start + program]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=LONG, cwd=folder)
    return done.stdout.split("\0")[1:-1] if done.stdout.startswith("program\0") else None


def read_words(program):
    """What the reader says is passed to ``program``: None for a word, or for all, that only bash knows."""
    try:
        commands = read_script(program).commands
    except Unreadable:
        return None
    found = [command for command in commands if command.words and text_of(command.words[0]) == "program"]
    return [text_of(word) for word in found[0].words[1:]] if found else None


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")


@needs_bash
@given(st.lists(PLAIN, max_size=5), st.lists(WORD, min_size=1, max_size=4), st.sampled_from(["\n", "\n\n  ", " ; "]))
@settings(max_examples=100, deadline=None)
def test_plain_lines_are_read_as_bash_reads_them(tmp_path_factory, statements, words, end):
    """Assignments, arrays, appends and expansions: the very words that bash makes, but for names without a value."""
    program = f"{end.join(['N=9', 'A=1 B=2', 'C=()', *statements])}\nprogram {' '.join(words)}"
    read = read_words(program)
    assert read is not None, program
    if None not in read:
        assert read == from_bash(program, tmp_path_factory.getbasetemp()), program
    else:
        named = set(re.findall(r"\$\{?([A-Za-z_]\w*)", program))
        assert "unset" in program or named - {"A", "B", "C", "N"}, program


@needs_bash
@given(st.lists(ANY, max_size=5), st.lists(WORD, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_nothing_is_guessed(tmp_path_factory, statements, words):
    """Among statements of every kind, whatever the reader knows is what bash makes of it."""
    program = "\n".join(["N=9", *statements, "program " + " ".join(words)])
    read = read_words(program)
    if read is not None and None not in read:
        assert read == (from_bash(program, tmp_path_factory.getbasetemp()) or []), program
