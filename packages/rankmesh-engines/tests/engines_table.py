"""The table of the page on layouts, from what the program says: ``python engines_table.py ROWS``.

ROWS is a file with what ``engines_beside.py all`` printed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.peers import fetch

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "reference" / "layouts.md"
BEGIN, END = "<!-- cells -->\n", "<!-- end of cells -->"


def measured(*arguments, program="engines_beside", limit=600):
    """The rows of a program beside this file; the last lines of what it printed where it fails."""
    environment = {**os.environ, "PYTHONPATH": f"{fetch.trainers()}:{REPOSITORY}", "PYTHONWARNINGS": "ignore",
                   "PYTHONFAULTHANDLER": "1"}  # fmt: skip  # the engines' compiled code has crashed without a word
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(f"{program}.py"), *arguments],
        capture_output=True, text=True, timeout=limit, env=environment, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return parsed(done.stdout)


def parsed(text):
    """The rows among what a program printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"model"')]


def table(rows):
    """A line for each side, a column for each model; reasons below, each once."""
    cells = {(row["side"], row["model"]): row for row in rows if "side" in row}
    models = list(dict.fromkeys(model for _, model in cells))
    reasons, lines = [], [f"| side | {' | '.join(models)} |", f"| --- |{' --- |' * len(models)}"]
    for side in dict.fromkeys(side for side, _ in cells):
        line = []
        for model in models:
            row = cells[side, model]
            left = row.get("why") or "; ".join(sorted(set(row["refused"].values())))
            if left:
                why = _short(left)
                reasons += [why] if why not in reasons else []
                line.append(
                    f"refused ({reasons.index(why) + 1})" if "why" in row else f"exact, but ({reasons.index(why) + 1})"
                )
            else:
                line.append("exact")
        lines.append(f"| `{side}` | {' | '.join(line)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))]) + "\n"


def _short(why):
    """The reason without what differs from model to model."""
    why = re.sub(r"`\w+ForCausalLM`", "this model", why.partition(". Pass")[0].partition(" [type=")[0])
    why = re.sub(r"KeyError: '[\w.]+'", "KeyError: the name of a weight of another stage", why)
    why = re.sub(r"The expanded size of the tensor .*", "a layer has more experts than a rank's parameter", why)
    return re.sub(r" as rank \d+", "", why.partition("; change")[0].partition("; it has")[0])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = parsed(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")
