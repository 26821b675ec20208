/** What goes to paper: the picture as SVG, and the kinds. */
import type { App } from "./app";
import { h } from "./dom";
import { tables } from "./tables";

export function printed(app: App): void {
  const target = document.getElementById("print");
  if (!target) return;
  const picture = h("div", { class: "picture" });
  picture.innerHTML = app.stage.view.svg(app.state.spec);
  target.replaceChildren(h("h1", {}, app.given.title ?? app.state.spec), picture, ...tables(app).slice(0, 2));
}
