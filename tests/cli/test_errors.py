from pathlib import Path

import pytest

from rankmesh.cli.look import groups
from rankmesh.cli.shell import EXIT_CODES, ExitCode


def _arguments(value: object) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))


PLACE = ("place", "dp=4,tp=2", "-c", "host=2,leaf=2,spine=2")
STEP = ("--batch", 64, "--sequence", 2048)
SEARCH = ("search", "-w", 8, "-c", "host=8", "-m", "llama3-8b")
EXPLORE = ("explore", "tp=2", "--html", "-")
# One of each kind; what each reader refuses is tested beside it.
REFUSED = [
    (("show", "lama3-405b"), "did you mean 'llama3-405b'?"),
    (("show", "megatron"), "recipe 'megatron' is given without its sizes; write them, such as megatron:world=64,tp=2"),
    (("search", "-w", 8, "-c", "host=8", "-m", "llama-3-8b"), "did you mean 'llama3-8b'"),
    (("search", "-w", 37, "-c", "host=8", "-m", "llama3-8b", "--batch", 8, "--sequence", 9), "no sizes fit 37 ranks"),
    (("show", "tp2-dp4"), "did you mean 'tp=2,dp=4'?"),
    (("show", "tp:2,dp:*"), "did you mean 'tp=2,dp=*'?"),
    (("show", "tp=2;dp=4"), "are not joined by commas; did you mean 'tp=2,dp=4'?"),
    (("show", "tp=2,dp=2", "-w", 8), "set dp=4"),
    (("show", "tp=3,dp=*", "-w", 4), "sizes of tp that fit: 1, 2, 4"),
    (("show", "tp=2,cp=5,pp=*", "-w", 12), "sizes of cp that fit: 1, 2, 3, 6"),
    (("show", "tp=2,dp=2", "--groups", "ddp"), "did you mean 'dp'?"),
    (("diff", "tp=2", "nope"), "write an axis string"),
    (("cluster", "host=8,leaf=*"), "leaves a size open, and there is no world to infer it from; write the size"),
    (("cluster", "host=8,leaf=100000000"), "has 800000000 devices, but at most 2,097,152 are read"),
    (("cluster", "host=8,rail=4"), "levels are nested, and the rails of a fabric"),
    (("cluster",), "give a string (host=8,leaf=4)"),
    (("cluster", "none.yaml"), "cannot be read"),
    (("presets", "nope"), "the presets are"),
    (("show", "dp=99999999999"), "up to 4,194,304"),
    (("show", "tp=2", "--set", "TP=2"), "leave --set out"),
    ((*PLACE, "--within", "tp=rack"), "this cluster has the levels"),
    ((*PLACE, "--within", "dp=host"), "would fit: 1, 2"),
    ((*PLACE, "--traffic", "none.json"), "cannot be read"),
    ((*PLACE, "--backend", "mpi"), "nccl and gloo"),
    ((*SEARCH, *STEP, "--device", "h900"), "unknown device 'h900'; give one of v100, a100"),
    ((*SEARCH, *STEP, "--recompute", "some"), "recompute is 'some'; give one of none"),
    ((*SEARCH, *STEP, "--speed", "missing.json"), "missing.json"),
    (("doctor", Path(__file__).parent), "holds no recording"),
    (("checkpoint", "convert", Path(__file__).parent, "to", "--to", "dcp"), "holds no checkpoint"),
]

MISUSED = [
    (("show",), "Missing argument 'SPEC'"),
    (("show", "tp=2", "--bar"), "No such option: --bar"),
    (("show", "tp=2", "--gpus-per-node", "0"), "Invalid value for '--gpus-per-node'"),
    (("show", "tp=2", "-g", "99999999999999999999"), "Invalid value for '--gpus-per-node'"),
    (("show", "tp=2", "--members", "many"), "Invalid value for '--members'"),
    (("explain", "tp=2", "one"), "Invalid value for 'RANK': Input should be a valid integer"),
    (("explain", "tp=2", "-1"), "No such option: -1"),
    (("show", "tp=2", "-w", "0"), "greater than or equal to 1, but it is '0'"),
    (("check", "tp=2", "-t", "soon"), "but it is 'soon'"),
    (("diff", "tp=2"), "Missing argument 'RIGHT'"),
    (("shw", "tp=2"), "No such command 'shw'"),
    (("schema", "hosts"), "'hosts' is not one of 'plan', 'cluster'"),
    (("checkpoint", "show", ".", "to", "--to", "dcp"), "'show' is not one of 'convert'"),
    (("checkpoint", "convert", ".", "to", "--to", "pt"), "'pt' is not one of"),
    (("transfer", "tp=2", "tp=4", "-m", "llama3-8b", "--tensors", "t.json"), "--tensors"),
    (("show", "tp=2", "--svg", "-", "--html", "-"), "--svg and --html would both go to stdout"),
    (("show", "tp=2", "--save", "-", "--json"), "--save and --json would both go to stdout"),
    ((*EXPLORE, "--json"), "--html and --json would both go to stdout"),
    ((*EXPLORE, "-g", 0), "greater than or equal to 1, but it is '0'"),
    *((("show", "tp=2", *words), "is for a script that runs; add --run")
      for words in (("2",), ("--launch", "1"), ("-y",), ("--sandbox", "none"))),
    ((*PLACE, "--within", "tp"), "write a kind and a level"),
    ((*PLACE, "--model", "mixtral-8x7b"), "no batch and no sequence is given"),
    ((*PLACE, "--batch", 8), "--batch is of a model; add --model"),
    ((*PLACE, "--virtual-stages", 2), "--virtual-stages is of a model"),
    ((*PLACE, "--model", "mixtral-8x7b", *STEP, "--traffic", "traffic.json"), "give one of the two"),
    (SEARCH, "no batch and no sequence is given"),
    *(((*SEARCH, *STEP, "--speed", speed), "is not a speed") for speed in ("0", "140%", "nan")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "rule"), REFUSED, ids=_arguments)
def test_a_refused_layout_is_one_line_and_exit_3(rankmesh, arguments: tuple[object, ...], rule: str) -> None:
    """What cannot be is refused with its rule on stderr, nothing on stdout, and exit code 3."""
    ran = rankmesh(*arguments)
    assert (ran.code, ran.out) == (ExitCode.BAD_SPEC, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert rule in ran.err


@pytest.mark.parametrize("arguments", [("show", "tp=2", "--cluster", "host=8"), ("cluster", "host=8")], ids=_arguments)
def test_an_option_that_has_no_effect_is_named(rankmesh, arguments: tuple[object, ...]) -> None:
    """--gpus-per-node beside a cluster that says it is not used, and a note says so."""
    ran = rankmesh(*arguments, "-g", 4)
    assert ran.code == 0
    assert "note: --gpus-per-node 4 is not used: 'host=8' says how many devices a host has" in ran.err


@pytest.mark.parametrize(("arguments", "rule"), MISUSED, ids=_arguments)
def test_wrong_usage_is_one_line_and_exit_2(rankmesh, arguments: tuple[object, ...], rule: str) -> None:
    """A wrong option or argument is named, with the help to read."""
    ran = rankmesh(*arguments)
    assert (ran.code, ran.out) == (ExitCode.USAGE, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert rule in ran.err
    assert "--help)" in ran.err


@pytest.mark.parametrize(
    ("problem", "code", "arguments"),
    [
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (MemoryError(), ExitCode.BAD_SPEC, "does not fit in memory"),
        (ZeroDivisionError("x"), ExitCode.INTERNAL, "a defect in rankmesh: ZeroDivisionError: x"),
    ],
)
def test_other_failures_are_one_line(rankmesh, monkeypatch, problem, code, arguments) -> None:
    """Ctrl-C, a lack of memory and defects have exit codes of their own and no traceback."""

    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(groups, "kind_groups", fail)
    ran = rankmesh("groups", "tp=2", "tp")
    assert ran.code == code
    assert arguments in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("arguments", [("show", "nope", "--debug"), ("--debug", "show", "nope")])
def test_debug_shows_the_traceback(rankmesh, monkeypatch: pytest.MonkeyPatch, arguments) -> None:
    """--debug, before or after the subcommand, adds the traceback and keeps line and exit code."""
    monkeypatch.setenv("RANKMESH_DEBUG", "")  # so that what --debug sets is undone
    monkeypatch.setattr("sys.excepthook", None)  # which may be anybody's, such as torch's
    ran = rankmesh(*arguments)
    assert ran.code == 3
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: unknown layout 'nope'")


def test_every_exit_code_is_in_the_help(rankmesh) -> None:
    """rankmesh --help documents each exit code by number and meaning."""
    ran = rankmesh("--help")
    assert ran.code == 0
    for line in EXIT_CODES.splitlines():
        assert line in ran.out
