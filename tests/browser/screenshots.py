"""Seven views of the explorer, as the pages show them: `python -m tests.browser.screenshots` writes docs/images.

```
explorer            a rank that is pointed at, among hosts        explorer-compare   two layouts side by side
explorer-mesh       five axes, blocks inside blocks               explorer-hang      who hangs, and who waits for whom
explorer-far        131,072 ranks, in the dark                    explorer-slow      how long others wait for each rank
explorer-tables     a layout as tables
```
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.browser.conftest import PAGE, ROOT, WINDOW, chromium
from tests.slow.making import LATE, report

from rankmesh.cli.look.explore import explored
from rankmesh.viz.explorer import page as page_text

IMAGES = ROOT / "docs" / "images"
RECORDINGS = ROOT / "tests" / "hangs" / "recordings" / "skips_a_call"
_MOE = "megatron:world=32,tp=2,cp=2,pp=2,ep=8,etp=1"
# The fragment of each view; a hang and a slow job are pages of their own.
VIEWS = {
    "explorer": f"spec={_MOE}&cluster=host=8,leaf=*&rank=13",
    "explorer-mesh": "spec=tp=2,cp=2,ep=2,dp=4,pp=2&cluster=8&arrange=mesh&kind=ep",
    "explorer-far": "spec=tp=8,cp=2,pp=16,dp=512&cluster=host=8,nvlink=8,leaf=32,spine=*&kind=pp&theme=dark",
    "explorer-compare": f"spec={_MOE}&compare=megatron:world=32,tp=4,pp=2,ep=8,etp=1&kind=tp&cluster=8",
    "explorer-hang": "cluster=2",
    "explorer-slow": "cluster=8",
    "explorer-tables": f"spec={_MOE}&cluster=8&tab=table&kind=ep_dp",
}


def main(target: Path = IMAGES) -> None:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        late = replace(LATE, since=1e9, evidence="it computes for longer than the 127 other ranks in its place")
        report(256, late, replace(late, cause="host", ranks=tuple(range(96, 104)), hosts=("node12",))).write(folder)
        made = {"explorer-hang": ("tp=2,dp=2", RECORDINGS), "explorer-slow": ("tp=8,pp=2,dp=16", folder)}
        for name, (spec, recordings) in made.items():
            text = page_text(explored(spec, recordings=recordings))
            Path(folder, f"{name}.html").write_text(text, encoding="utf-8")
        browser = chromium(playwright)
        for name, fragment in VIEWS.items():
            page = browser.new_context(viewport=WINDOW, color_scheme="light").new_page()
            page.goto(f"{(Path(folder, f'{name}.html') if name in made else PAGE).as_uri()}#{fragment}")
            page.wait_for_function("rankmesh.app.state.tab === 'table' || rankmesh.app.stage.view.took.rectangles > 0")
            page.screenshot(path=target / f"{name}.png")
            page.context.close()
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
