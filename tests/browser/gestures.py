"""What each gesture in the explorer costs, in two large worlds.

The pointer, the wheel, a pin, an arrow key, a kind, an arrangement, the size of an axis: nine times each, forced to be
painted. Milliseconds are this machine's; rectangles and elements are the page's own, and a test bounds them.
"""

from __future__ import annotations

from typing import Any

from tests.browser.conftest import PAGE

# The page's fragment by world size.
WORLDS = {
    "4096": "spec=megatron:world=4096,tp=8,cp=2,pp=8,ep=8,etp=1&cluster=host=8,leaf=*",
    "131072": "spec=megatron:world=131072,tp=8,cp=2,pp=16,ep=32,etp=1&cluster=host=8,nvlink=8,leaf=32,spine=*",
}
_TIMED = """() => {
  const { app } = rankmesh, { spec } = app.state, world = app.model.plan.worldSize, view = app.stage.view;
  const kinds = [...app.model.plan.kinds.keys()], element = document.querySelector('.view');
  const counts = [0, 0];
  const counted = (owner, name, place) => {
    const original = owner[name];
    owner[name] = function (...how) { counts[place]++; return original.apply(this, how); };
    return () => { owner[name] = original; };
  };
  const stop = [counted(CanvasRenderingContext2D.prototype, 'fillRect', 0), counted(document, 'createElement', 1)];
  const timed = (act) => { counts.fill(0); const start = performance.now(); act();
    document.querySelector('canvas').getContext('2d').getImageData(0, 0, 1, 1); document.body.offsetHeight;
    return [performance.now() - start, ...counts]; };
  const nine = (act) => Array.from({ length: 9 }, (_, turn) => timed(() => act(turn)));
  const found = {
    point: nine((turn) => app.point((turn * 7919 + 13) % world)),
    away: nine((turn) => { app.hover = turn; app.point(null); }),
    zoom: nine((turn) => view.zoomBy(turn % 2 ? 0.4 : 2.5)),
    pin: nine((turn) => app.pin((turn * 104729) % world)),
    walk: nine(() => element.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))),
    kind: nine((turn) => app.set({ kind: kinds[turn % kinds.length], rank: null })),
    arrange: nine((turn) => app.set({ arrange: turn % 2 ? 'places' : 'mesh' })),
    size: nine((turn) => app.set({ spec: spec.replace(/ep=[0-9]+/, 'ep=' + [2, 4, 16][turn % 3]) })),
  };
  stop.forEach((each) => each());
  return found;
}"""


def gestures(page: Any, fragment: str) -> dict[str, list[list[float]]]:
    """Milliseconds, rectangles and elements of each of nine turns, by gesture."""
    page.goto("about:blank")
    page.goto(f"{PAGE.as_uri()}#{fragment}")
    page.wait_for_function("rankmesh.app.stage.view.took.rectangles > 0")
    found: dict[str, list[list[float]]] = page.evaluate(_TIMED)
    return found
