/**
 * The drawing on the screen: a canvas that is moved, zoomed, pointed at, and walked over with the arrow keys.
 */
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import { nestOf, type Nest } from "./arrange";
import { h } from "./dom";
import { draw, type Drawn, type Transform } from "./draw";
import { centreOf, geometryOf, originOf, slotAt, type Geometry } from "./geometry";
import type { Model } from "./model";
import { CanvasPainter, SvgPainter, type Painter } from "./paint";
import type { Scene } from "./scene";
import type { Arrangement } from "./state";

export interface Listeners {
  /** A rank is pointed at, or none any more. */
  readonly point: (rank: number | null) => void;
  /** A rank is walked to with the keys. */
  readonly walk: (rank: number) => void;
  readonly pin: (rank: number) => void;
  readonly leave: () => void;
  /** The drawing is new: what its squares stand for may have changed. */
  readonly drawn: () => void;
}

const EDGE = 14;
const STEPS: Partial<Record<string, readonly [number, number]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export class View {
  readonly element: HTMLElement;
  /** Milliseconds that the last drawing took, and rectangles in it. */
  took = { milliseconds: 0, rectangles: 0, aggregate: 0 };
  #canvas = h("canvas");
  #zoom: ZoomBehavior<HTMLCanvasElement, unknown>;
  #nest: Nest | null = null;
  #geometry: Geometry | null = null;
  #scene: Scene | null = null;
  #key = "";
  #size = { width: 0, height: 0 };
  #down: { x: number; y: number } | null = null;

  constructor(
    label: string,
    readonly listeners: Listeners,
  ) {
    this.element = h(
      "div",
      {
        class: "view",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "map of ranks",
        "aria-label": label,
        "data-key": label,
      },
      this.#canvas,
    );
    this.#zoom = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([0.5, 64])
      .on("zoom", () => this.redraw());
    select(this.#canvas).call(this.#zoom).on("dblclick.zoom", null);
    this.#listen();
    new ResizeObserver(() => this.#resize()).observe(this.element);
  }

  #listen(): void {
    const canvas = this.#canvas;
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 0) this.listeners.point(this.#rankAt(event));
    });
    canvas.addEventListener("pointerleave", () => this.listeners.point(null));
    canvas.addEventListener("pointerdown", (event) => (this.#down = { x: event.clientX, y: event.clientY }));
    canvas.addEventListener("click", (event) => {
      // A finger is less steady than a mouse.
      const most = event.pointerType === "touch" ? 12 : 4;
      const still = this.#down && Math.hypot(event.clientX - this.#down.x, event.clientY - this.#down.y) < most;
      const rank = this.#rankAt(event);
      if (still && rank !== null) this.listeners.pin(rank);
    });
    this.element.addEventListener("keydown", (event) => {
      if (this.#pressed(event)) event.preventDefault();
    });
  }

  /** Show a model; the view is fitted anew when the layout or its arrangement changed. */
  show(model: Model, arrange: Arrangement, scene: Scene): void {
    const key = `${arrange} ${model.plan.mesh.toString()} ${model.plan.worldSize} ${model.cluster?.toString() ?? ""}`;
    this.#scene = scene;
    if (key !== this.#key || !this.#nest) {
      this.#key = key;
      this.#nest = nestOf(model, arrange);
      this.#fit();
    }
    this.redraw();
  }

  #resize(): void {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height || (width === this.#size.width && height === this.#size.height)) return;
    this.#size = { width, height };
    this.#canvas.width = Math.round(width * devicePixelRatio);
    this.#canvas.height = Math.round(height * devicePixelRatio);
    this.#fit();
    this.redraw();
  }

  /** Lay the nest out for this room, whole. */
  #fit(): void {
    const { width, height } = this.#size;
    if (!this.#nest || !width) return;
    this.#geometry = geometryOf(this.#nest, this.#key.startsWith("mesh") ? "mesh" : "places", width / height);
    this.#zoom.translateExtent([
      [-width * 0.5, -height * 0.5],
      [width * 1.5, height * 1.5],
    ]);
    select(this.#canvas).call((canvas) => this.#zoom.transform(canvas, zoomIdentity));
  }

  /** Everything in view. */
  whole(): void {
    this.#fit();
  }

  zoomBy(factor: number): void {
    select(this.#canvas).call((canvas) => this.#zoom.scaleBy(canvas, factor));
  }

  get #zoomed(): ZoomTransform {
    return (this.#canvas as HTMLCanvasElement & { __zoom?: ZoomTransform }).__zoom ?? zoomIdentity;
  }

  /** World to pixels: the whole drawing fits at zoom 1. */
  #transform({ width, height }: { width: number; height: number }, zoomed: ZoomTransform): Transform {
    const geometry = this.#geometry!;
    const fit = Math.min((width - 2 * EDGE) / geometry.width, (height - 2 * EDGE) / geometry.height, 3);
    const x = (width - geometry.width * fit) / 2;
    const y = (height - geometry.height * fit) / 2;
    return {
      k: fit * zoomed.k,
      x: zoomed.x + x * zoomed.k,
      y: zoomed.y + y * zoomed.k,
    };
  }

  redraw(): void {
    const context = this.#canvas.getContext("2d");
    if (!context || !this.#nest || !this.#geometry || !this.#scene) return;
    const start = performance.now();
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const drawn = this.#draw(new CanvasPainter(context), this.#size, this.#zoomed);
    const before = this.took.aggregate;
    this.took = { milliseconds: performance.now() - start, ...drawn };
    if (drawn.aggregate !== before) this.listeners.drawn();
  }

  #draw(painter: Painter, size: { width: number; height: number }, zoomed: ZoomTransform): Drawn {
    return draw(painter, size, this.#nest!, this.#geometry!, this.#scene!, this.#transform(size, zoomed));
  }

  /** The drawing as SVG: what is in view. */
  svg(label: string): string {
    const painter = new SvgPainter();
    if (this.#nest && this.#geometry && this.#scene) this.#draw(painter, this.#size, this.#zoomed);
    return painter.document(this.#size.width, this.#size.height, label);
  }

  /** The drawing as PNG, twice as fine as the screen. */
  async png(): Promise<Blob | null> {
    const canvas = h("canvas", {
      width: this.#size.width * 2,
      height: this.#size.height * 2,
    });
    const context = canvas.getContext("2d");
    if (!context || !this.#nest || !this.#geometry || !this.#scene) return null;
    context.scale(2, 2);
    this.#draw(new CanvasPainter(context), this.#size, this.#zoomed);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }

  #slotAt(x: number, y: number): number | null {
    if (!this.#geometry) return null;
    const at = this.#transform(this.#size, this.#zoomed);
    return slotAt(this.#geometry, {
      x: (x - at.x) / at.k,
      y: (y - at.y) / at.k,
    });
  }

  #rankAt(event: MouseEvent): number | null {
    const frame = this.#canvas.getBoundingClientRect();
    const slot = this.#slotAt(event.clientX - frame.left, event.clientY - frame.top);
    const rank = slot === null ? -1 : this.#nest!.rankAt[slot];
    return rank < 0 ? null : rank;
  }

  /** What a square of the drawing stands for: null for one rank. */
  get aggregate(): { name: string; ranks: number } | null {
    const depth = this.took.aggregate;
    const box = this.#geometry?.boxes[depth];
    if (!depth || !box || !this.#nest) return null;
    return { name: this.#nest.depths[depth]?.name ?? "world", ranks: box.slots };
  }

  /** Where a rank is on the screen, in pixels of the page; for tests and for what points at it. */
  pointOf(rank: number): { x: number; y: number } | null {
    const slot = this.#nest?.slotOf[rank] ?? -1;
    if (slot < 0 || !this.#geometry) return null;
    const at = this.#transform(this.#size, this.#zoomed);
    const frame = this.#canvas.getBoundingClientRect();
    const centre = centreOf(this.#geometry, slot);
    return {
      x: frame.left + centre.x * at.k + at.x,
      y: frame.top + centre.y * at.k + at.y,
    };
  }

  /** Bring a rank near enough to be read, unless it is. */
  reveal(rank: number): void {
    const slot = this.#nest?.slotOf[rank] ?? -1;
    if (slot < 0 || !this.#geometry) return;
    const at = this.#transform(this.#size, this.#zoomed);
    const cell = this.#geometry.boxes[0];
    const origin = originOf(this.#geometry, slot);
    const [x, y] = [origin.x * at.k + at.x, origin.y * at.k + at.y];
    const seen =
      x >= 0 && y >= 0 && x + cell.width * at.k <= this.#size.width && y + cell.height * at.k <= this.#size.height;
    if (seen && cell.height * at.k >= 14) return;
    const base = this.#transform(this.#size, zoomIdentity);
    const k = Math.min(Math.max(this.#zoomed.k, 24 / (cell.height * base.k)), 64);
    const centre = centreOf(this.#geometry, slot);
    const point: [number, number] = [centre.x * base.k + base.x, centre.y * base.k + base.y];
    select(this.#canvas).call((canvas) =>
      this.#zoom.transform(
        canvas,
        zoomIdentity
          .translate(this.#size.width / 2, this.#size.height / 2)
          .scale(k)
          .translate(-point[0], -point[1]),
      ),
    );
  }

  #pressed(event: KeyboardEvent): boolean {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const here = this.#scene?.focus ?? null;
    const step = STEPS[event.key];
    if (step) this.#walk(here, step);
    else if (event.key === "Home" || event.key === "End") this.#goTo(event.key === "Home" ? 1 : -1);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.5);
    else if (event.key === "-") this.zoomBy(1 / 1.5);
    else if (event.key === "0") this.whole();
    else if ((event.key === "Enter" || event.key === " ") && here !== null) this.listeners.pin(here);
    else if (event.key === "Escape") this.listeners.leave();
    else return false;
    return true;
  }

  #goTo(step: number): void {
    const ranks = this.#nest?.rankAt ?? new Int32Array();
    const rank = step > 0 ? ranks.find((each) => each >= 0) : ranks.findLast((each) => each >= 0);
    if (rank !== undefined) this.listeners.walk(rank);
  }

  /** The next rank in a direction: across gaps, up to the edge. */
  #walk(here: number | null, [x, y]: readonly [number, number]): void {
    if (here === null || !this.#nest || !this.#geometry) {
      this.#goTo(1);
      return;
    }
    const from = this.#nest.slotOf[here];
    const cell = this.#geometry.boxes[0];
    const centre = centreOf(this.#geometry, from);
    const step = Math.min(cell.width, cell.height) / 2;
    const most = Math.max(this.#geometry.width, this.#geometry.height) / step;
    for (let number = 1; number < most; number++) {
      const point = {
        x: centre.x + x * step * number,
        y: centre.y + y * step * number,
      };
      if (point.x < 0 || point.y < 0 || point.x > this.#geometry.width || point.y > this.#geometry.height) return;
      const slot = slotAt(this.#geometry, point);
      if (slot === null || slot === from || this.#nest.rankAt[slot] < 0) continue;
      this.listeners.walk(this.#nest.rankAt[slot]);
      return;
    }
  }
}
