/** The middle: one drawing, or two side by side, or the tables; what is chosen above, what it means below. */
import type { App } from "./app";
import { kindColour } from "./colours";
import { fill, h, number, plural } from "./dom";
import { changedRanks } from "../formula/difference";
import { neighbours, waits } from "./lines";
import type { Model } from "./model";
import { FocusScene, GroupsScene, HangScene, MeasuredScene, type Scene } from "./scene";
import { fragmentOf, type Overlay } from "./state";
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
      point: (rank: number | null) => {
        app.point(rank);
      },
      walk: (rank: number) => {
        this.#walk(rank);
      },
      pin: (rank: number) => {
        app.pin(rank);
      },
      drawn: () => {
        fill(this.#legend, ...legend(app));
      },
      leave: () => {
        app.set({ rank: null, pins: [] });
        app.say("nothing is pinned");
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
    this.draw();
    app.say(rankWords(app.model, rank));
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
    const { colours, rank, kind } = app;
    const scene = this.#base(model);
    const focused = rank !== null && rank < model.plan.worldSize;
    if (app.state.overlay === "hang" && app.given.hang) scene.lines = waits(app.given.hang, colours);
    else if (focused) scene.lines = neighbours(model, colours, kindsOf(app, model), kind, rank);
    if (app.compared) scene.changed = changed(app, model);
    return scene;
  }

  #base(model: Model): FocusScene | GroupsScene | MeasuredScene | HangScene {
    const { app } = this;
    const { colours, rank, pins, kind, given } = app;
    const shown = model.plan.kinds.has(kind) ? kind : model.leading[0];
    if (app.state.overlay === "hang" && given.hang) return new HangScene(model, colours, pins, given.hang);
    if (app.found.length && rank === null) return new FoundScene(model, colours, pins, shown, new Set(app.found));
    if (rank !== null && rank < model.plan.worldSize)
      return new FocusScene(model, colours, pins, rank, kindsOf(app, model));
    if (app.state.overlay === "measured" && given.measured)
      return new MeasuredScene(model, colours, pins, shown, given.measured);
    return new GroupsScene(model, colours, pins, shown);
  }
}

/** What a search found keeps its colours, the rest fades. */
class FoundScene extends GroupsScene {
  constructor(
    model: Model,
    colours: App["colours"],
    pins: readonly number[],
    kind: string,
    readonly found: ReadonlySet<number>,
  ) {
    super(model, colours, pins, kind);
  }

  override of(rank: number): ReturnType<GroupsScene["of"]> {
    return this.found.has(rank)
      ? { stripes: [this.colours.kinds[0]], ink: this.colours.onKind }
      : { stripes: [this.colours.cell], ink: this.colours.soft };
  }

  override block(rankAt: Int32Array, start: number, stop: number): ReturnType<GroupsScene["of"]> {
    const some = rankAt.subarray(start, stop).some((rank) => this.found.has(rank));
    return {
      stripes: [some ? this.colours.kinds[0] : this.colours.cell],
      ink: this.colours.ink,
    };
  }
}

const kindsOf = (app: App, model: Model): string[] => app.kinds.filter((kind) => model.plan.kinds.has(kind));

function changed(app: App, model: Model): Uint8Array | null {
  const { model: one, compared, kind } = app;
  if (!compared?.plan.kinds.has(kind) || !one.plan.kinds.has(kind)) return null;
  const world = Math.max(one.plan.worldSize, compared.plan.worldSize);
  return changedRanks(one.plan.groups(kind), compared.plan.groups(kind), world).subarray(0, model.plan.worldSize);
}

/** A rank in words: its place and its groups. */
export function rankWords(model: Model, rank: number): string {
  const host = model.cluster ? ` on ${model.cluster.hostOf(rank)}` : "";
  if (!model.has(rank)) return `rank ${rank}${host}, outside the mesh`;
  const place = [...model.plan.mesh.coordinate(rank)].map(([axis, at]) => `${axis} ${at}`).join(", ");
  return `rank ${rank}${host}: ${place}`;
}

function bar(app: App, stage: Stage): (Node | null)[] {
  const { state, model } = app;
  const toggle = (words: string, pressed: boolean, change: () => void, title = ""): HTMLElement =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": pressed ? "true" : "false",
        "data-key": `bar ${words}`,
        onclick: change,
        title: title || null,
      },
      words,
    );
  const set = (change: Partial<App["state"]>) => () => {
    app.set(change);
  };
  const drawing = state.tab === "drawing";
  const kinds = h(
    "select",
    {
      "data-key": "kind",
      onchange: (event: Event) => {
        app.set({ kind: (event.target as HTMLSelectElement).value });
      },
    },
    ...model.plan.specs.map((each) => h("option", { value: each.name, selected: each.name === app.kind }, each.name)),
  );
  const overlays: [Overlay, string][] = [["none", "groups"]];
  if (app.given.measured) overlays.push(["measured", "measured"]);
  if (app.given.hang) overlays.push(["hang", "hang"]);
  return [
    h(
      "div",
      { class: "switch", role: "group", "aria-label": "What is shown" },
      toggle("Drawing", drawing, set({ tab: "drawing" })),
      toggle("Tables", !drawing, set({ tab: "table" })),
    ),
    drawing && model.cluster
      ? h(
          "div",
          {
            class: "switch",
            role: "group",
            "aria-label": "How ranks are arranged",
          },
          toggle("Places", state.arrange === "places", set({ arrange: "places" }), "hosts and what holds them"),
          toggle("Mesh", state.arrange === "mesh", set({ arrange: "mesh" }), "axes inside axes"),
        )
      : null,
    overlays.length > 1 && drawing
      ? h(
          "div",
          {
            class: "switch",
            role: "group",
            "aria-label": "What the colours say",
          },
          ...overlays.map(([overlay, words]) => toggle(words, state.overlay === overlay, set({ overlay }))),
        )
      : null,
    h("label", { class: "inline" }, "Colour by", kinds),
    state.embed
      ? h(
          "a",
          {
            class: "open",
            target: "_blank",
            href: `#${fragmentOf({ ...state, embed: false }, app.start)}`,
          },
          "Open the explorer",
        )
      : null,
    drawing
      ? h(
          "div",
          { class: "zoom", role: "group", "aria-label": "Zoom" },
          ...(
            [
              ["−", "Zoom out", 1 / 1.5],
              ["+", "Zoom in", 1.5],
            ] as const
          ).map(([sign, label, factor]) =>
            h(
              "button",
              {
                type: "button",
                "aria-label": label,
                "data-key": label,
                onclick: () => {
                  stage.view.zoomBy(factor);
                  if (app.compared) stage.second.zoomBy(factor);
                },
              },
              sign,
            ),
          ),
          h(
            "button",
            {
              type: "button",
              "data-key": "fit",
              onclick: () => {
                stage.view.whole();
                stage.second.whole();
              },
            },
            "Fit",
          ),
        )
      : null,
  ];
}

/** What the colours of the drawing mean now. */
function legend(app: App): Node[] {
  const { model, colours, rank } = app;
  const swatch = (colour: string): HTMLElement => h("span", { class: "swatch", style: `background:${colour}` });
  if (app.state.overlay === "hang" && app.given.hang)
    return [
      h("span", {}, swatch(colours.cause), "named as a cause"),
      h("span", {}, swatch(colours.waits), "waits"),
      h("span", {}, "lines lead to whom a rank waits for"),
    ];
  if (rank !== null)
    return [
      h("b", {}, rankWords(model, rank)),
      ...kindsOf(app, model).map((kind, place) => h("span", {}, swatch(kindColour(colours, place)), kind)),
    ];
  if (app.found.length) return [h("span", {}, swatch(colours.kinds[0]), plural(app.found.length, "rank"), " found")];
  const groups = model.plan.groups(app.kind);
  if (app.state.overlay === "measured" && app.given.measured)
    return [
      h("span", {}, swatch(colours.scale(0)), "slow"),
      h("span", {}, swatch(colours.scale(1)), `fastest of ${app.kind}`),
    ];
  const crossing = model.crossings(app.kind);
  const cross = crossing ? `, ${number(crossing.crossing)} cross hosts` : "";
  const words = `each colour is one group of ${app.kind}: ${plural(groups.count, "group")} of ${number(groups.size)}${cross}`;
  const { aggregate } = app.stage.view;
  const far = aggregate
    ? [
        h(
          "span",
          {},
          `each square stands for the ${number(aggregate.ranks)} ranks of one ${aggregate.name}; a hollow one holds more than four groups. Zoom in for ranks.`,
        ),
      ]
    : [];
  const changedWords = app.compared
    ? [h("span", {}, swatch(colours.cause), `a corner: another group of ${app.kind}`)]
    : [];
  return [h("span", {}, ...[0, 1, 2].map((group) => swatch(colours.groups[group])), words), ...far, ...changedWords];
}
