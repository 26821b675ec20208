/** The middle: one drawing, or two side by side, or the tables; what is chosen above, what it means below. */
import type { App } from "./app";
import { fill, h } from "./dom";
import { changedRanks } from "../formula/difference";
import { neighbours, waits } from "./lines";
import type { Model } from "./model";
import { FocusScene, FoundScene, GroupsScene, HangScene, MeasuredScene, SlowScene, type Scene } from "./scene";
import { bar } from "./bar";
import { legend, rankText } from "./legend";
import { tables } from "./tables";
import { View } from "./view";

export class Stage {
  readonly element: HTMLElement;
  readonly view: View;
  readonly second: View;
  readonly #bar = h("div", { class: "bar" });
  readonly #views = h("div", { class: "views" });
  readonly #tables = h("div", { class: "tables" });
  readonly #legend = h("div", { class: "legend" });
  readonly #captions = [h("div", { class: "caption" }), h("div", { class: "caption" })];

  constructor(readonly app: App) {
    const listeners = {
      point: (rank: number | null) => app.point(rank),
      walk: (rank: number) => this.#walk(rank),
      pin: (rank: number) => app.pin(rank),
      drawn: () => fill(this.#legend, ...legend(app)),
      leave: () => {
        app.set({ rank: null, pins: [] });
        app.announce("nothing is pinned");
      },
    };
    this.view = new View("The layout: arrow keys walk over the ranks, Enter pins, plus and minus zoom", listeners);
    this.second = new View("The layout that it is compared with", listeners);
    this.#views.append(
      h("div", { class: "pane" }, this.#captions[0], this.view.element),
      h("div", { class: "pane" }, this.#captions[1], this.second.element),
    );
    this.element = h("main", { class: "stage" }, this.#bar, this.#views, this.#tables, this.#legend);
  }

  #walk(rank: number): void {
    const { app } = this;
    app.hover = null;
    app.set({ rank });
    this.view.reveal(rank);
    app.announce(rankText(app.model, rank));
  }

  render(): void {
    const { app } = this;
    const drawing = app.state.tab === "drawing";
    fill(this.#bar, ...bar(app, this));
    this.#views.hidden = !drawing;
    this.#tables.hidden = drawing;
    this.#legend.hidden = !drawing;
    const pair = app.compared !== null && app.state.compare !== "";
    this.#views.classList.toggle("pair", pair);
    this.#views.classList.toggle("stale", app.error !== null);
    this.#views.lastElementChild!.toggleAttribute("hidden", !pair);
    this.#captions.forEach((caption) => (caption.hidden = !pair));
    this.#captions[0].textContent = app.state.spec;
    this.#captions[1].textContent = app.state.compare;
    if (drawing) this.draw();
    else fill(this.#tables, ...tables(app));
  }

  /** Draw what is shown, as it is now. */
  draw(): void {
    const { app } = this;
    if (app.state.tab !== "drawing") return;
    this.view.show(app.model, app.state.arrange, this.#scene(app.model));
    if (app.compared) this.second.show(app.compared, app.state.arrange, this.#scene(app.compared));
    fill(this.#legend, ...legend(app));
  }

  #scene(model: Model): Scene {
    const { app } = this;
    const { colours, focus, kind } = app;
    const scene = this.#base(model);
    const focused = focus !== null && focus < model.plan.worldSize;
    if (app.state.overlay === "hang" && app.given.hang) scene.lines = waits(app.given.hang, colours);
    else if (focused) scene.lines = neighbours(model, colours, kindsOf(app, model), kind, focus);
    if (app.compared) scene.changed = changed(app, model);
    return scene;
  }

  #base(model: Model): FocusScene | GroupsScene | MeasuredScene | HangScene | SlowScene {
    const { app } = this;
    const { colours, focus, pins, kind, given } = app;
    const shown = model.plan.kinds.has(kind) ? kind : model.leading[0];
    if (app.state.overlay === "hang" && given.hang) return new HangScene(model, colours, pins, given.hang);
    if (app.state.overlay === "slow" && given.hang?.speed) return new SlowScene(model, colours, pins, given.hang.speed);
    if (app.found.length && focus === null) return new FoundScene(model, colours, pins, shown, new Set(app.found));
    if (focus !== null && focus < model.plan.worldSize)
      return new FocusScene(model, colours, pins, focus, kindsOf(app, model));
    if (app.state.overlay === "measured" && given.measured)
      return new MeasuredScene(model, colours, pins, shown, given.measured);
    return new GroupsScene(model, colours, pins, shown);
  }
}

const kindsOf = (app: App, model: Model): string[] => app.kinds.filter((kind) => model.plan.kinds.has(kind));

function changed(app: App, model: Model): Uint8Array | null {
  const { model: one, compared, kind } = app;
  if (!compared?.plan.kinds.has(kind) || !one.plan.kinds.has(kind)) return null;
  const world = Math.max(one.plan.worldSize, compared.plan.worldSize);
  return changedRanks(one.plan.groups(kind), compared.plan.groups(kind), world).subarray(0, model.plan.worldSize);
}
