"""Launch scripts: the styles that people write, what is refused, and expansion as bash itself does it."""

import shutil
import subprocess
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmesh import PlanError
from rankmesh.plan import recipes
from rankmesh.readers import read_config
from rankmesh.readers.script import read_script
from rankmesh.readers.words import text_of

RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py "
TP = RUN + "--tensor-model-parallel-size "


def lines_of(config):
    """Each argument with its line and the lines that its value comes from."""
    return {reading.argument: (reading.line, *reading.also) for reading in config.readings}


STYLES = [
    (TP + "2", recipes.megatron(8, tp=2), {"tp": (1,), "world_size": (1,)}),
    (TP + "'2'", recipes.megatron(8, tp=2), {"tp": (1,), "world_size": (1,)}),
    (
        RUN + "--tensor-model-parallel-size=2 --use-tp-pp-dp-mapping",
        recipes.megatron(8, tp=2, order="tp-cp-ep-pp-dp"),
        {"tp": (1,), "order": (1,), "world_size": (1,)},
    ),
    (
        (
            'A="--nproc_per_node 8 \\\n --nnodes 2"\nB="\n --tensor-model-parallel-size 2 \\\n"\n'
            "python -m torch.distributed.launch $A \\\n pretrain_gpt.py $B --save $1 2>&1 | tee log\n"
        ),
        recipes.megatron(16, tp=2),
        {"tp": (4,), "world_size": (1, 2)},
    ),
    (
        'N=4\nWORLD_SIZE=$(($N * 2))\nCMD="python pretrain_gpt.py --context-parallel-size 2"\n$CMD > log &\nwait',
        recipes.megatron(8, cp=2),
        {"cp": (3,), "world_size": (2, 1)},
    ),
    ("TP=${TP:-4}\n" + TP + "$TP", recipes.megatron(8, tp=4), {"tp": (2, 1), "world_size": (2,)}),
    (": ${TP:=4}\n" + TP + "$TP", recipes.megatron(8, tp=4), {"tp": (2, 1), "world_size": (2,)}),
    ("TP=2\nTP=4\n" + TP + "${TP}", recipes.megatron(8, tp=4), {"tp": (3, 2), "world_size": (3,)}),
    (
        "A=(--tensor-model-parallel-size 2)\nA+=(\n  --context-parallel-size 2 # two\n)\n" + RUN + '"${A[@]}"',
        recipes.megatron(8, tp=2, cp=2),
        {"tp": (1,), "cp": (3,), "world_size": (5,)},
    ),
    (
        (
            "#SBATCH --nodes=2 --gpus-per-node=h100:8\n"
            'srun bash -c "torchrun --nproc_per_node=$SLURM_GPUS_PER_NODE \\\n'
            '--nnodes $SLURM_NNODES pretrain_gpt.py --tensor-model-parallel-size 2"'
        ),
        recipes.megatron(16, tp=2),
        {"tp": (3,), "world_size": (2, 3, 1)},
    ),
    (
        (
            "#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\n"
            "run='cd x && python pretrain_gpt.py --tensor-model-parallel-size 2'\n"
            'srun -l sh -c "${run}"'
        ),
        recipes.megatron(16, tp=2),
        {"tp": (3,), "world_size": (1,)},
    ),
    (
        "srun -n 16 python pretrain_gpt.py --tensor-model-parallel-size 2",
        recipes.megatron(16, tp=2),
        {"tp": (1,), "world_size": (1,)},
    ),
    (
        "srun -N 2 --ntasks-per-node 4 python pretrain_gpt.py --tensor-model-parallel-size 2",
        recipes.megatron(8, tp=2),
        {"tp": (1,), "world_size": (1,)},
    ),
    ("go() {\n" + TP + '$1 "${@}" $@\n}\ngo 2 --context-parallel-size 2', recipes.megatron(8, tp=2, cp=2), None),
    (
        'T=2\nrun_cmd="' + TP + '$T"\necho ${run_cmd}\neval $run_cmd',
        recipes.megatron(8, tp=2),
        {"tp": (2, 1), "world_size": (2,)},
    ),
    ("if x; then TP=2; else TP=2; fi\n" + TP + "$TP", recipes.megatron(8, tp=2), {"tp": (2, 1), "world_size": (2,)}),
    ("if x; then LOG=a; EXTRA='--fp16'; fi\n" + TP + "2 --save $LOG $EXTRA", recipes.megatron(8, tp=2), None),
    (
        TP + "2 \\\n  --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        recipes.megatron(8, tp=2, cp=4, hierarchical_cp=(2, 2)),
        {"tp": (1,), "cp": (2,), "hierarchical_cp": (2,), "world_size": (1,)},
    ),
    (
        "cat > other.sh <<EOF\n" + TP + "8\nEOF\n# " + TP + "4\n" + TP + "2",
        recipes.megatron(8, tp=2),
        {"tp": (5,), "world_size": (5,)},
    ),
    (
        (
            "unset TP\nexport TP=2 X=3\ndeclare -i N=8\ntorchrun --nproc-per-node $N pretrain_gpt.py "
            "--tensor-model-parallel-size $TP"
        ),
        recipes.megatron(8, tp=2),
        {"tp": (4, 2), "world_size": (4, 3)},
    ),
]


@pytest.mark.parametrize(("text", "plan", "lines"), STYLES)
def test_the_ways_that_scripts_are_written(text, plan, lines):
    """Strings, arrays, functions, eval, bash -c, Slurm's directives: the plan, and the lines that it was read from."""
    config = read_config(text, "run.sh")
    assert config.plan == plan
    if lines is not None:
        assert lines_of(config) == lines


REFUSED = [
    (TP + "$TP", ":1: received --tensor-model-parallel-size = [$]TP; the variable TP has no value in this file"),
    (TP + "$1", ":1: .*the arguments of the script are not known here"),
    (TP + "$(nproc)", ":1: .*the output of a command, which is not run"),
    (TP + "${TP%x}", ":1: .*more than a variable"),
    (TP + "two", ":1: .*whole number"),
    (TP, ":1: received --tensor-model-parallel-size = true; .*whole number"),
    ("A=0\n" + TP + "$((4 / A))", ":2: .*is not followed"),
    ("A=(--tensor-model-parallel-size 2)\n" + TP + "4 ${A[@]}", ":1: .*line 2 says --tensor-model-parallel-size = 4"),
    (TP + "2 --tensor-model-parallel-size 4", ":1: received --tensor-model-parallel-size = 4; line 1 says"),
    (TP + "2\n\n" + TP + "4", ":3: received 2 runs in one script [(]line 1: torchrun .*line 3: torchrun"),
    ("if x; then\n" + TP + "2\nelse\n" + TP + "4\nfi", "received 2 runs"),
    ("for TP in 1 2; do\n" + TP + "$TP\ndone", ":2: .*a loop sets it"),
    ("TP=2\nif x; then TP=4; fi\n" + TP + "$TP", ":3: .*TP is set in a branch [(]line 2[)]"),
    ("TP=2\nwhile x; do TP=4; done\n" + TP + "$TP", r":3: .*TP is set in a branch [(]line 2[)]"),
    (
        "TP=2\n" + TP + "$TP; echo 'unterminated\n" + TP + "4\n",
        r"^run.sh:\d+: received .*; this cannot be read as shell",
    ),
    ('TP=2\n[ -z "$X" ] && TP=4\n' + TP + "$TP", ":3: .*set in a branch"),
    ("case $X in a) TP=1;; *) TP=2;; esac\n" + TP + "$TP", ":2: .*set in a branch"),
    ("M=()\nif x; then M=(--expert-model-parallel-size 2); fi\n" + TP + "2 ${M[@]}", ":2: received .*set in a branch"),
    ("read TP\n" + TP + "$TP", ":2: .*the script sets it by read while it runs"),
    ("TP=2\nlet TP=4\n" + TP + "$TP", ":3: .*by let while it runs"),
    ("TP=2\nprintf -v TP 4\n" + TP + "$TP", ":3: .*by printf while it runs"),
    ("TP=2\n((TP*=2))\n" + TP + "$TP", ":3: .*set by arithmetic"),
    (TP + "$((010))", ":1: .*'010', which is no decimal number"),
    (
        "read -d '' A <<E\n--tensor-model-parallel-size 2\nE\n" + RUN + "$A",
        ":1: .*they may state sizes; write the sizes",
    ),
    (RUN + '"--tensor-model-parallel-size 2', ":1: received .*cannot be read as shell"),
    ("A[0]=2\n" + TP + "${A[0]}", ":2: .*more than a variable|set element"),
    (RUN + "--tensor-model-paralel-size 2 x", ":1: .*did you mean '--tensor-model-parallel-size'"),
    (RUN + "--sequence-parallel-size 2", ":1: .*looks like a parallel size"),
    (TP + "2 --encoder-tensor-model-parallel-size 2", ":1: .*a second mesh in the world"),
    (TP + "2 --use-mp-args-from-checkpoint-args", ":1: .*come from the checkpoint"),
    (TP + "2 --yaml-cfg a.yaml", ":1: .*give its path"),
    (TP + "3", "must divide the world size"),
    (
        "torchrun --nproc_per_node $N pretrain_gpt.py --tensor-model-parallel-size 2",
        ":1: .*--nproc_per_node is [$]N: the variable N has no value.*give --world-size",
    ),
    (
        "torchrun --nproc_per_node 8 --nnodes 1:4 pretrain_gpt.py --tensor-model-parallel-size 2",
        "1:4, which is no fixed",
    ),
    ("torchrun --nproc_per_node 8 --nproc_per_node 4 pretrain_gpt.py", ":1: .*line 1 says --nproc_per_node = 8"),
    ("python pretrain_gpt.py --tensor-model-parallel-size 2", ":1: .*give --world-size"),
    (
        "torchrun --nproc_per_node 8 train.py --config a.toml",
        ":1: .*without an argument of Megatron .it names --config = a",
    ),
    ("echo " + TP + "2", "starts no training"),
    ("ls", "starts no training"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_a_script_leaves_open_is_refused(text, words):
    """Variables without one value, branches, loops, several runs and contradictions name the line and a remedy."""
    with pytest.raises(PlanError, match=words) as caught:
        read_config(text, "run.sh")
    assert str(caught.value).startswith("run.sh")


def test_a_world_size_for_a_launcher_that_does_not_say():
    """--world-size stands in for counts that the script leaves open."""
    text = "torchrun --nproc_per_node $N pretrain_gpt.py --tensor-model-parallel-size 2"
    assert read_config(text, "run.sh", world_size=16).plan == recipes.megatron(16, tp=2)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (TP + "2 --$EXTRA", (1, "--$EXTRA is unknown; arguments that it adds are not read")),
        (TP + "2\necho (", (2, "( cannot be read as shell; not read")),
        (TP + "2 $EXTRA", (1, "$EXTRA is unknown; arguments that it adds are not read")),
        (TP + '2 "$@"', (1, "$@ is unknown; arguments that it adds are not read")),
        (". env.sh\n" + TP + "2", (1, ". env.sh is another file; not read")),
        (
            TP + "${TP:-2}",
            (1, "${TP:-2} is read as its default; the environment may say otherwise"),
        ),
        (
            TP + "2 --sequence-parallel x.py",
            (1, "--sequence-parallel = true uses the tp groups; it makes none"),
        ),
    ],
)
def test_what_is_not_read_is_said(text, note):
    """Arguments that come from elsewhere, files, defaults and options that make no groups are notes."""
    assert read_config(text, "run.sh").notes == (note,)


ARGUMENTS = "# the run\n\n--tensor-model-parallel-size 2 \\\n--context-parallel-size=2 # two\n--save 'a b'\n"


def test_a_file_of_arguments():
    """Lines of arguments without a program are one run; the world size stands there, or is given."""
    config = read_config(ARGUMENTS + "--world-size 8\n", "args.txt")
    assert config.plan == read_config(ARGUMENTS, "args.txt", world_size=8).plan == recipes.megatron(8, tp=2, cp=2)
    assert lines_of(config) == {"tp": (3,), "cp": (4,), "world_size": (6,)}
    assert config.title == "a file of Megatron's arguments"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ARGUMENTS, "args.txt:1: .*give --world-size"),
        (ARGUMENTS + "--save 'a", "args.txt:[0-9]+: received [^A].*cannot be read as shell"),
        ("--num-layers 2\n", "args.txt:1: .*without an argument of Megatron"),
    ],
)
def test_a_file_of_arguments_that_says_too_little(text, words):
    """Without a world size, without an end of a quote, without a size."""
    with pytest.raises(PlanError, match=words):
        read_config(text, "args.txt")


def test_a_default_that_no_size_comes_from_is_not_said():
    """Notes are about the layout."""
    assert read_config("DIR=${DIR:-out}\n" + TP + "2 --save $DIR", "run.sh").notes == ()


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


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("f() { local TP=4; }; f", "2"),
        ("f() { declare TP=4; }; f", "2"),
        ("f() { declare -g TP=4; }; f", "4"),
        ("f() { local TP; g; }; g() { TP=4; }; f", "2"),
        ("f() { TP=4; }; f", "4"),
        ("(TP=4)", "2"),
        ("TP=4 | cat", "2"),
        ("((TP == 4))", "2"),
        ("((TP >= 1))", "2"),
        ("let TP==4", "2"),
        ("((TP++))", None),
        ("((--TP))", None),
        ("((A = (TP <<= 1)))", None),
        ("let TP++", None),
        ("let A=1 TP*=2", None),
    ],
)
def test_what_a_statement_does_to_a_variable(statement, value):
    """Locals end with their function, and what a subshell sets with it; what arithmetic sets is unknown."""
    command = read_script(f"TP=2\n{statement}\nprogram $TP").commands[-1]
    assert [text_of(word) for word in command.words] == ["program", value]


NAMES = st.sampled_from("ABC")
WORDS = st.sampled_from(["1", "7", "-x", "--a=b", "x y", " z ", ""])
PIECES = st.one_of(
    st.sampled_from(["w", "4", "-f", "'q  r'", '"s  t"', "a\\;", "'$A'", '"\\$A"']),
    NAMES.map("${}".format),
    NAMES.map("${{{}}}".format),
    NAMES.map('"${}"'.format),
    NAMES.map('"p ${{{}}}  e"'.format),
    NAMES.map("${{{}:-d e}}".format),
    NAMES.map("${{{}-7}}".format),
    NAMES.map('"${{{}[@]}}"'.format),
    NAMES.map("${{{}[@]}}".format),
    NAMES.map('"${{{}[*]}}"'.format),
    st.sampled_from(["$((3 * (N + 2)))", "$((N/2-5))", "$(($N % 4))", "$(( (2 - N) / 2 ))", "$(( (2 - N) % 4 ))"]),
)
WORD = st.lists(PIECES, min_size=1, max_size=2).map("".join)
STATEMENT = st.one_of(
    st.builds("{}={}".format, NAMES, PIECES),
    st.builds("{}+={}".format, NAMES, st.sampled_from(["1", '" u"', "'v  w'"])),
    st.builds("{}=( {} )".format, NAMES, st.lists(WORD, max_size=3).map("\n  ".join)),
    st.builds("{}+=( {} )".format, NAMES, WORD),
    st.builds("unset {}".format, NAMES),
    st.builds('{}="1 \\\n  2\n3"'.format, NAMES),
    st.builds("export {}={}".format, NAMES, st.sampled_from(["5", '"6 7"'])),
    st.builds("if true; then {}=8; else {}=8; fi".format, NAMES, NAMES),
    st.builds("({}=8)".format, NAMES),
    st.builds("{}=8 | cat".format, NAMES),
    st.builds("f() {{ local {}=8 {}; {}=9; }}; f".format, NAMES, NAMES, NAMES),
    st.builds("{} {}+=3".format, st.sampled_from(["let", "let A=1"]), NAMES),
    st.builds("(({} = (N += 1), {}++, N == 3))".format, NAMES, NAMES),
    st.builds("printf -v {} 8".format, NAMES),
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@given(st.lists(STATEMENT, max_size=5), st.lists(WORD, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_words_become_what_bash_makes_of_them(statements, words):
    """Whatever the reader gives a text to is what bash makes of the same assignments and words."""
    program = "\n".join(["N=9", *statements, "program " + " ".join(words)])
    command = next(command for command in read_script(program).commands if text_of(command.words[0]) == "program")
    read = [text_of(word) for word in command.words]
    shell = [
        "env",
        "-i",
        shutil.which("bash"),
        "--norc",
        "-c",
        "program() { printf '%s\\0' program \"$@\"; }\n" + program,
    ]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=20)
    if None not in read:
        assert "".join(f"{word}\0" for word in read) == done.stdout, program
