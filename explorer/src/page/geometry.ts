/**
 * The nest in the plane: the size of a block of each depth, and how its blocks lie in columns and rows.
 *
 *     ┌ pp 0 ──────────────┐      a block has a heading and a margin; inside, columns × rows of the blocks below
 *     │ ┌ dp 0 ─┐ ┌ dp 1 ─┐ │
 *     │ │ 0  1  │ │ 2  3  │ │
 *     └────────────────────┘
 */
import type { Nest } from "./arrange";
import type { Arrangement } from "./state";

/** A block of one depth: its size, the blocks inside it, and where they begin. */
export interface Box {
  readonly width: number;
  readonly height: number;
  readonly columns: number;
  readonly rows: number;
  readonly gap: number;
  readonly margin: number;
  readonly head: number;
  /** Slots in it. */
  readonly slots: number;
}

export interface Point {
  readonly x: number;
  readonly y: number;
}

export interface Geometry {
  /** `boxes[0]` is a cell, the last one everything. */
  readonly boxes: readonly Box[];
  readonly width: number;
  readonly height: number;
}

const CELL_HEIGHT = 30;

/** Boxes for a nest whose whole has about this ratio of width to height. */
export function geometryOf(nest: Nest, arrange: Arrangement, ratio: number): Geometry {
  const digits = String(nest.slotOf.length - 1).length;
  const cell = { width: Math.max(34, 12 + 8 * digits), height: CELL_HEIGHT };
  const boxes: Box[] = [{ ...cell, columns: 0, rows: 0, gap: 0, margin: 0, head: 0, slots: 1 }];
  nest.depths.forEach((depth, number) => {
    const last = number === nest.depths.length - 1;
    const across = number % 2 === 0;
    const wish = last ? ratio : arrange === "places" ? 1.8 : across ? 2.4 : 1.1;
    boxes.push(boxOf(boxes[number], depth.count, number + 1, wish, last, arrange === "mesh"));
  });
  const whole = boxes[boxes.length - 1];
  return { boxes, width: whole.width, height: whole.height };
}

function boxOf(inner: Box, count: number, depth: number, wish: number, last: boolean, lines: boolean): Box {
  const gap =
    [2, 8, 12, 18, 26, 36][Math.min(depth - 1, 5)] + 0.03 * Math.min(inner.width, inner.height) * Number(depth > 2);
  const margin = last ? 0 : gap;
  let best: Box | null = null;
  let least = Infinity;
  for (const columns of candidates(count)) {
    const rows = Math.ceil(count / columns);
    const width = columns * inner.width + (columns - 1) * gap + 2 * margin;
    const inside = rows * inner.height + (rows - 1) * gap + margin;
    const head = last ? 0 : Math.max(19, 0.1 * Math.min(width, inside));
    const empty = (columns * rows - count) / count;
    const wrapped = lines && columns > 1 && rows > 1 ? (count > 8 ? 0.5 : 1) : 0;
    const cost = Math.abs(Math.log(width / (inside + head) / wish)) + 2 * empty + wrapped;
    if (cost >= least) continue;
    least = cost;
    best = {
      width,
      height: inside + head,
      columns,
      rows,
      gap,
      margin,
      head,
      slots: inner.slots * count,
    };
  }
  return best!;
}

/** Columns worth a try: all of few, of many those near the divisors. */
function candidates(count: number): number[] {
  const all = Array.from({ length: count }, (_, number) => number + 1);
  return count <= 64 ? all : all.filter((columns) => count % columns === 0 || columns % 8 === 0);
}

/** Where block `number` of depth `depth - 1` begins inside its box of depth `depth`. */
export function offsetIn(geometry: Geometry, depth: number, number: number): Point {
  const [box, inner] = [geometry.boxes[depth], geometry.boxes[depth - 1]];
  return {
    x: box.margin + (number % box.columns) * (inner.width + box.gap),
    y: box.head + Math.floor(number / box.columns) * (inner.height + box.gap),
  };
}

/** Where the block of one depth that holds a slot begins. */
export function originOf(geometry: Geometry, slot: number, depth = 0): Point {
  let [x, y] = [0, 0];
  for (let outer = geometry.boxes.length - 1; outer > depth; outer--) {
    const inner = geometry.boxes[outer - 1];
    const offset = offsetIn(geometry, outer, Math.floor((slot % geometry.boxes[outer].slots) / inner.slots));
    x += offset.x;
    y += offset.y;
  }
  return { x, y };
}

export function centreOf(geometry: Geometry, slot: number): Point {
  const { x, y } = originOf(geometry, slot);
  return {
    x: x + geometry.boxes[0].width / 2,
    y: y + geometry.boxes[0].height / 2,
  };
}

/** The slot at a point; null between the blocks. */
export function slotAt(geometry: Geometry, { x, y }: Point): number | null {
  let slot = 0;
  for (let depth = geometry.boxes.length - 1; depth > 0; depth--) {
    const [box, inner] = [geometry.boxes[depth], geometry.boxes[depth - 1]];
    x -= box.margin;
    y -= box.head;
    const [column, row] = [Math.floor(x / (inner.width + box.gap)), Math.floor(y / (inner.height + box.gap))];
    x -= column * (inner.width + box.gap);
    y -= row * (inner.height + box.gap);
    const number = row * box.columns + column;
    const outside = column < 0 || row < 0 || column >= box.columns || number * inner.slots >= box.slots;
    if (outside || x > inner.width || y > inner.height) return null;
    slot += number * inner.slots;
  }
  return slot;
}
