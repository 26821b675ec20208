/**
 * The drawing: blocks inside blocks, as far in as can be seen; lines and marks on top.
 *
 * A block whose blocks would be smaller than `SEEN` pixels is one rectangle with the colours of what it stands for, so
 * a drawing of any world costs what its pixels cost.
 */
import { curveCatmullRom, curveCatmullRomClosed, line } from "d3-shape";
import type { Nest } from "./arrange";
import { centreOf, offsetIn, originOf, type Geometry, type Point } from "./geometry";
import type { Painter } from "./paint";
import type { Look, Scene } from "./scene";

/** Pixels = x · k + the shift. */
export interface Transform {
  readonly k: number;
  readonly x: number;
  readonly y: number;
}

export interface Canvas {
  readonly width: number;
  readonly height: number;
}

const SEEN = 4;
const READ = 7.5;

/** What a drawing took: its rectangles, and the depth whose blocks stand for their ranks (0: every rank is drawn). */
export interface Drawn {
  readonly rectangles: number;
  readonly aggregate: number;
}

/** Draw a scene. */
export function draw(
  painter: Painter,
  canvas: Canvas,
  nest: Nest,
  geometry: Geometry,
  scene: Scene,
  at: Transform,
): Drawn {
  const drawing = new Drawing(painter, canvas, nest, geometry, scene, at);
  painter.rect(0, 0, canvas.width, canvas.height, scene.colours.paper);
  drawing.block(geometry.boxes.length - 1, 0, at.x, at.y);
  drawing.marks();
  return { rectangles: drawing.count, aggregate: drawing.aggregated };
}

type Pixel = [number, number];

class Drawing {
  count = 0;
  aggregated = 0;
  /** Ranks are written over the lines. */
  readonly #text: (() => void)[] = [];

  constructor(
    readonly painter: Painter,
    readonly canvas: Canvas,
    readonly nest: Nest,
    readonly geometry: Geometry,
    readonly scene: Scene,
    readonly at: Transform,
  ) {}

  /** The block of one depth that begins at a slot, and all that can be seen inside it. */
  block(depth: number, slot: number, x: number, y: number): void {
    const { k } = this.at;
    const box = this.geometry.boxes[depth];
    const [width, height] = [box.width * k, box.height * k];
    if (x > this.canvas.width || y > this.canvas.height || x + width < 0 || y + height < 0) return;
    if (this.#empty(slot, box.slots)) return;
    this.count++;
    if (depth === 0) {
      this.#cell(slot, x, y, width, height);
      return;
    }
    const inner = this.geometry.boxes[depth - 1];
    this.#ground(depth, slot, x, y, width, height);
    if (Math.min(inner.width, inner.height) * k < SEEN) {
      this.#aggregate(depth, slot, x, y, width, height);
      return;
    }
    for (let number = 0; number * inner.slots < box.slots; number++) {
      const offset = offsetIn(this.geometry, depth, number);
      this.block(depth - 1, slot + number * inner.slots, x + offset.x * k, y + offset.y * k);
    }
  }

  #empty(slot: number, slots: number): boolean {
    if (slots === 1) return this.nest.rankAt[slot] < 0;
    for (let each = slot; each < slot + slots; each++) if (this.nest.rankAt[each] >= 0) return false;
    return true;
  }

  #whole(depth: number): boolean {
    return depth === this.geometry.boxes.length - 1;
  }

  /** The place that a block is: its ground, its frame and its name. */
  #ground(depth: number, slot: number, x: number, y: number, width: number, height: number): void {
    if (this.#whole(depth)) return;
    const { colours } = this.scene;
    const box = this.geometry.boxes[depth];
    const { k } = this.at;
    const host = this.nest.hosts === depth;
    const radius = Math.min(6 * k + 2, 10, width / 6, height / 6);
    this.painter.rect(x, y, width, height, colours.place[Math.min(depth - 1, 3)], radius);
    if (Math.min(width, height) > 14)
      this.painter.frame(x, y, width, height, host ? colours.lineHeavy : colours.line, host ? 1.4 : 1, radius);
    const size = Math.min(13, box.head * k * 0.74);
    if (size < READ) return;
    const label = this.nest.depths[depth].label(slot / box.slots);
    const space = width - 2 * box.margin * k - 2;
    if (label.length * size * 0.58 > space) return;
    this.painter.text(x + box.margin * k + 1, y + box.head * k * 0.5 + size * 0.36, label, {
      size,
      fill: host || depth > 1 ? colours.ink : colours.soft,
      bold: depth > 1,
    });
  }

  /** A block as one rectangle. */
  #aggregate(depth: number, slot: number, x: number, y: number, width: number, height: number): void {
    this.aggregated = Math.max(this.aggregated, depth);
    const box = this.geometry.boxes[depth];
    const { k } = this.at;
    const look = this.scene.block(this.nest.rankAt, slot, slot + box.slots);
    const whole = this.#whole(depth);
    const margin = whole ? 0 : Math.min(box.margin * k, 2);
    const head = box.head * k * 0.74 >= READ ? box.head * k : margin;
    this.#stripes(look, x + margin, y + head, width - 2 * margin, height - head - margin, 0);
    if (this.scene.changed) this.#changed(slot, box.slots, x, y, Math.min(width, height));
  }

  #stripes(look: Look, x: number, y: number, width: number, height: number, radius: number): void {
    const { stripes } = look;
    if (stripes.length === 1) {
      this.painter.rect(x, y, width, height, stripes[0], radius);
      if (look.many) this.#hollow(x, y, width, height);
      return;
    }
    const part = width / stripes.length;
    stripes.forEach((fill, place) =>
      this.painter.rect(x + place * part, y, part + 0.5 * Number(place < stripes.length - 1), height, fill),
    );
  }

  /** Many groups, of which the colour is that of the first. */
  #hollow(x: number, y: number, width: number, height: number): void {
    const edge = Math.max(1, 0.22 * Math.min(width, height));
    this.painter.rect(x + edge, y + edge, width - 2 * edge, height - 2 * edge, this.scene.colours.place[0]);
  }

  #cell(slot: number, x: number, y: number, width: number, height: number): void {
    const rank = this.nest.rankAt[slot];
    const look = this.scene.of(rank);
    const { colours } = this.scene;
    const radius = Math.min(3 * this.at.k, 6);
    this.#stripes(look, x, y, width, height, radius);
    if (look.stripes[0] === colours.cell && width > 8)
      this.painter.frame(x + 0.5, y + 0.5, width - 1, height - 1, colours.line, 1, radius);
    if (this.scene.changed) this.#changed(slot, 1, x, y, Math.min(width, height));
    const size = Math.min(15, height * 0.42, (width / String(rank).length) * 1.25);
    if (size < 6) return;
    const { note, ink } = look;
    const noted = note !== undefined && height >= 44 && note.length * size * 0.45 < width;
    const middle = y + height / 2 + size * 0.35;
    const bold = rank === this.scene.focus;
    this.#text.push(() => {
      const top = noted ? middle - size * 0.45 : middle;
      this.painter.text(x + width / 2, top, String(rank), { size, fill: ink, align: "middle", bold });
      if (noted)
        this.painter.text(x + width / 2, middle + size * 0.7, note, { size: size * 0.75, fill: ink, align: "middle" });
    });
  }

  /** A corner on what compares unequal. */
  #changed(slot: number, slots: number, x: number, y: number, side: number): void {
    let any = false;
    for (let each = slot; each < slot + slots && !any; each++) any = this.scene.changed![this.nest.rankAt[each]] === 1;
    if (!any) return;
    const edge = Math.min(12, side * 0.4);
    this.painter.area(`M${x} ${y}h${edge}l${-edge} ${edge}z`, this.scene.colours.cause);
  }

  #pixel({ x, y }: Point): Pixel {
    return [Math.round((x * this.at.k + this.at.x) * 10) / 10, Math.round((y * this.at.k + this.at.y) * 10) / 10];
  }

  /** Lines between ranks, pins, and the frame of the rank that is pointed at. */
  marks(): void {
    const { scene } = this;
    for (const each of scene.lines) this.#line(each);
    for (const write of this.#text) write();
    scene.pins.forEach((rank, place) => this.#frame(rank, scene.colours.cause, "AB"[place]));
    if (scene.focus !== null) this.#frame(scene.focus, scene.colours.focus, "");
  }

  #line({ ranks, colour, closed, heavy, arrow }: Scene["lines"][number]): void {
    const slots = ranks.map((rank) => this.nest.slotOf[rank]).filter((slot) => slot >= 0);
    const points = slots.map((slot) => this.#pixel(centreOf(this.geometry, slot)));
    if (points.length < 2) return;
    const short = points.length === 2;
    const path = short ? this.#between(points[0], points[1]) : points;
    const curve = closed && !short ? curveCatmullRomClosed : curveCatmullRom;
    const d = line().curve(curve)(path);
    if (!d) return;
    const weight = heavy ? 2.5 : 1.4;
    this.painter.path(d, this.scene.colours.paper, weight + 2);
    this.painter.path(d, colour, weight, !heavy);
    if (arrow) this.#arrow(path[path.length - 2], path[path.length - 1], colour);
  }

  /** From edge to edge of two cells, around what lies between. */
  #between(from: Pixel, to: Pixel): Pixel[] {
    const [x, y] = [to[0] - from[0], to[1] - from[1]];
    const far = Math.hypot(x, y) || 1;
    const cell = this.geometry.boxes[0];
    const edge = Math.min(cell.width / Math.abs(x / far || 1e-9), cell.height / Math.abs(y / far || 1e-9)) / 2;
    const away = Math.max(0, Math.min(edge * this.at.k - 4, far / 2 - 9));
    const beside = Math.min(0.12 * far, 60);
    const shift = (part: number, side: number): Pixel => [
      from[0] + x * part - (y / far) * side,
      from[1] + y * part + (x / far) * side,
    ];
    return [shift(away / far, -beside * 0.25), shift(0.5, -beside), shift(1 - away / far, -beside * 0.25)];
  }

  #arrow([x0, y0]: Pixel, [x, y]: Pixel, colour: string): void {
    const angle = Math.atan2(y - y0, x - x0);
    const head = (length: number, ahead: number): string => {
      const [tipX, tipY] = [x + ahead * Math.cos(angle), y + ahead * Math.sin(angle)];
      const corner = (step: number): string =>
        `${(tipX - length * Math.cos(angle + step)).toFixed(1)} ${(tipY - length * Math.sin(angle + step)).toFixed(1)}`;
      return `M${tipX.toFixed(1)} ${tipY.toFixed(1)}L${corner(0.5)}L${corner(-0.5)}z`;
    };
    this.painter.area(head(14, 3), this.scene.colours.paper);
    this.painter.area(head(9, 0), colour);
  }

  #frame(rank: number, colour: string, letter: string): void {
    const slot = this.nest.slotOf[rank] ?? -1;
    if (slot < 0) return;
    const [x, y] = this.#pixel(originOf(this.geometry, slot));
    const cell = this.geometry.boxes[0];
    const [width, height] = [Math.max(6, cell.width * this.at.k), Math.max(6, cell.height * this.at.k)];
    this.painter.frame(x - 1.5, y - 1.5, width + 3, height + 3, colour, 2.5, 5);
    if (!letter) return;
    this.painter.rect(x - 8, y - 9, 16, 16, colour, 8);
    this.painter.text(x, y + 3, letter, {
      size: 11,
      fill: this.scene.colours.onKind,
      align: "middle",
      bold: true,
    });
  }
}
