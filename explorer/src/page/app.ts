/**
 * The page: one state, what follows from it, and the parts that show it.
 *
 *     controls ─┐                        ┌─ stage (drawings or tables)
 *     stage    ─┼─> state ─> model ──────┼─ controls
 *     fragment ─┘     └─> fragment       └─ inspector
 */
import { RankmeshError } from "../formula/messages";
import { DARK, LIGHT, type Colours } from "./colours";
import { controls } from "./controls";
import { fill, h } from "./dom";
import { GIVEN, type Given } from "./given";
import { header } from "./header";
import { inspector } from "./inspector";
import { Model } from "./model";
import { printed } from "./printed";
import { Stage } from "./stage";
import { fragmentOf, START, stateOf, type State } from "./state";

export class App {
  readonly start: State;
  state: State;
  model: Model;
  /** Why the SPEC or the cluster cannot be; the drawing is then the last one that could. */
  error: string | null = null;
  compared: Model | null = null;
  compareError: string | null = null;
  /** The rank under the pointer. */
  hover: number | null = null;
  /** Ranks that a search found. */
  found: readonly number[] = [];
  #key = "";
  #compareKey = "";
  #formsKey = "";
  readonly #parts = {
    header: h("header", { class: "top" }),
    controls: h("div"),
    inspector: h("aside", {
      class: "inspector",
      "aria-label": "What is shown",
    }),
    live: h("div", { class: "unseen", role: "status", "aria-live": "polite" }),
  };
  readonly stage: Stage;

  constructor(
    readonly given: Given,
    readonly root: HTMLElement,
  ) {
    this.start = { ...START, ...given.state };
    this.state = stateOf(location.hash, this.start);
    this.model = this.#first();
    this.stage = new Stage(this);
    const { header: top, controls: left, inspector: right, live } = this.#parts;
    root.append(top, folded(left), this.stage.element, right, live);
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== fragmentOf(this.state, this.start)) this.set(stateOf(location.hash, this.start));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.render());
    addEventListener("beforeprint", () => printed(this));
    this.render();
  }

  /** The first model: of the fragment, else of what the page starts with. */
  #first(): Model {
    const { spec, world, cluster } = this.state;
    try {
      return Model.of(spec, world, cluster, this.given);
    } catch {
      const { start } = this;
      return Model.of(start.spec, start.world, start.cluster, this.given);
    }
  }

  get colours(): Colours {
    return this.dark ? DARK : LIGHT;
  }

  get dark(): boolean {
    return this.state.theme === "auto"
      ? matchMedia("(prefers-color-scheme: dark)").matches
      : this.state.theme === "dark";
  }

  /** The rank in the panel: under the pointer, else the one that was walked to, else the last one pinned. */
  get rank(): number | null {
    return this.#pointed ?? this.pins.at(-1) ?? null;
  }

  /** The rank in the drawing: a pin gives way to ranks that a search found, to bandwidths and to a hang. */
  get focus(): number | null {
    return this.found.length || this.state.overlay !== "none" ? this.#pointed : this.rank;
  }

  get #pointed(): number | null {
    const { rank } = this.state;
    return this.hover ?? (rank !== null && rank < this.model.plan.worldSize ? rank : null);
  }

  get pins(): readonly number[] {
    return this.state.pins.filter((rank) => rank < this.model.plan.worldSize);
  }

  /** The kind whose groups are coloured: as chosen, else the first that is worth a colour. */
  get kind(): string {
    const { kinds } = this.model.plan;
    return kinds.has(this.state.kind) ? this.state.kind : this.model.leading[0];
  }

  /** The kinds that have a colour when a rank is pointed at: the leading ones, and the chosen one. */
  get kinds(): string[] {
    const { leading } = this.model;
    const { plan } = this.model;
    const known = leading.some((name) => plan.partition(name) === plan.partition(this.kind));
    return known
      ? leading.map((name) => (plan.partition(name) === plan.partition(this.kind) ? this.kind : name))
      : [...leading, this.kind];
  }

  set(change: Partial<State>): void {
    this.state = { ...this.state, ...change };
    const fragment = fragmentOf(this.state, this.start);
    if (location.hash.slice(1) !== fragment)
      history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
    this.render();
  }

  point(rank: number | null): void {
    if (rank === this.hover) return;
    this.hover = rank;
    this.stage.draw();
    this.#inspect();
  }

  pin(rank: number): void {
    const { pins } = this;
    // A new pin is what the panel shows, also where the keys or a search had led to another rank.
    if (pins.includes(rank)) this.set({ pins: pins.filter((other) => other !== rank) });
    else this.set({ pins: [...pins, rank].slice(-2), rank: null });
    this.announce(
      this.pins.length === 2 ? `pinned ${this.pins.join(" and ")}` : `pinned ${this.pins.join() || "nothing"}`,
    );
  }

  /** Words for those who do not see the drawing. */
  announce(text: string): void {
    this.#parts.live.textContent = text;
  }

  #update(): void {
    const { spec, world, cluster, compare } = this.state;
    const key = JSON.stringify([spec, world, cluster]);
    if (key !== this.#key) {
      this.#key = key;
      this.found = [];
      const made = attempt(() => Model.of(spec, world, cluster, this.given));
      this.error = made.error;
      if (made.model) this.model = made.model;
    }
    const compareKey = JSON.stringify([compare, cluster]);
    if (compareKey === this.#compareKey) return;
    this.#compareKey = compareKey;
    const other = compare
      ? attempt(() => Model.of(compare, null, cluster === GIVEN ? cluster : devicesOf(cluster), this.given))
      : null;
    this.compareError = other?.error ?? null;
    this.compared = other?.model ?? (compare ? this.compared : null);
  }

  render(): void {
    this.#update();
    document.documentElement.dataset.theme = this.dark ? "dark" : "light";
    this.root.classList.toggle("embed", this.state.embed);
    document.title = `${this.given.title ?? this.state.spec} · rankmesh explorer`;
    this.#forms();
    this.stage.render();
    this.#inspect();
  }

  /** The header and the controls, which only what they speak of makes anew. */
  #forms(): void {
    const { spec, world, cluster, compare, embed } = this.state;
    const key = JSON.stringify([spec, world, cluster, compare, embed, this.dark, this.error, this.compareError]);
    if (key === this.#formsKey || embed) return;
    this.#formsKey = key;
    fill(this.#parts.header, ...header(this));
    fill(this.#parts.controls, ...controls(this));
  }

  #inspect(): void {
    fill(this.#parts.inspector, ...inspector(this));
  }
}

/** The controls: beside the drawing, or above it and closed at first where the screen is narrow. */
function folded(controls: HTMLElement): HTMLElement {
  const fold = h("details", {}, h("summary", {}, "Sizes, order, machine"), controls);
  const narrow = matchMedia("(max-width: 1080px)");
  const follow = (): void => {
    fold.open = !narrow.matches;
  };
  narrow.addEventListener("change", follow);
  follow();
  return h("nav", { class: "controls", "aria-label": "Layout and machine" }, fold);
}

/** For a world of another size: the same devices a host. */
const devicesOf = (cluster: string): string =>
  cluster.includes("*") || /^\d*$/.test(cluster) ? cluster : (/=(\d+)/.exec(cluster)?.[1] ?? "");

function attempt(make: () => Model): {
  model: Model | null;
  error: string | null;
} {
  try {
    return { model: make(), error: null };
  } catch (error) {
    if (!(error instanceof RankmeshError)) throw error;
    return { model: null, error: error.message };
  }
}
