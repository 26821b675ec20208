/**
 * Groups: the ranks that agree on every coordinate but those of the chosen axes.
 *
 *     group of a rank = base + members      base: its digits along the fixed axes, members: all digits of the others
 *
 * A kind may be narrowed twice: `level` regroups the positions of each group as one level of a hierarchy, `picked`
 * keeps some positions. `of(rank)` lists one group; `array()` is the whole world, group after group.
 */
import { integer, product } from "./axes";
import type { RankRange } from "./rank_range";
import { between, coalesced, dense, digitsOf, positionOf, sizeOf, valueAt, values, type Pairs } from "./strided";
import { layoutError, shortened, tuple } from "./messages";

export interface Level {
  readonly stride: number;
  readonly width: number;
}

export class Groups {
  #array: Int32Array | null = null;
  #index: Int32Array | null = null;

  constructor(
    readonly rankRange: RankRange,
    readonly axes: readonly string[],
    readonly members: Pairs,
    readonly fixed: readonly string[],
    readonly bases: Pairs,
    readonly level: Level | null = null,
    readonly picked: readonly number[] | null = null,
  ) {}

  get width(): number {
    return this.level ? this.level.width : sizeOf(this.members);
  }

  /** How many ranks each group has. */
  get size(): number {
    return this.picked ? this.picked.length : this.width;
  }

  get #pieces(): number {
    return sizeOf(this.members) / this.width;
  }

  /** How many groups there are. */
  get count(): number {
    return sizeOf(this.bases) * this.#pieces;
  }

  levelOf(sizes: readonly number[], level: number): Groups {
    const widths = sizes.map((size) => integer(size, "size of a level", 1));
    const whole = sizeOf(this.members);
    if (product(widths) !== whole)
      throw layoutError(
        `level sizes ${shortened(tuple(widths))} have the product ${product(widths)}, but groups along ` +
          `${this.axes.join("-")} have ${whole} ranks; give sizes whose product is ${whole}`,
      );
    if (level >= widths.length)
      throw layoutError(`level ${level} of ${shortened(tuple(widths))} does not exist; give 0 to ${widths.length - 1}`);
    const [width, stride] = dense(widths)[level];
    return new Groups(this.rankRange, this.axes, this.members, this.fixed, this.bases, { stride, width }, this.picked);
  }

  pick(positions: readonly number[]): Groups {
    const size = this.width;
    const outside = positions.find((position) => position < -size || position >= size);
    if (outside !== undefined)
      throw layoutError(`a pick has position ${outside}, but groups have ${size} ranks; give ${-size} to ${size - 1}`);
    const picked = [...new Set(positions.map((position) => (position + size) % size))];
    return new Groups(this.rankRange, this.axes, this.members, this.fixed, this.bases, this.level, picked);
  }

  /** Where a rank is: the number of its group, and its position in the whole group. */
  #locate(rank: number): { group: number; position: number } {
    const number = this.rankRange.position(rank);
    const base = positionOf(this.bases, digitsOf(this.bases, number));
    const place = positionOf(this.members, digitsOf(this.members, number));
    if (!this.level) return { group: base, position: place };
    const { stride, width } = this.level;
    const rest = Math.floor(place / stride);
    const piece = Math.floor(rest / width) * stride + (place % stride);
    return { group: base * this.#pieces + piece, position: rest % width };
  }

  has(rank: number): boolean {
    if (!this.rankRange.has(rank)) return false;
    return !this.picked || this.picked.includes(this.#locate(rank).position);
  }

  /** The number of a rank's group. */
  indexOf(rank: number): number {
    return this.#locate(rank).group;
  }

  /** The position of a rank among the members of its group. */
  positionOf(rank: number): number {
    const { position } = this.#locate(rank);
    return this.picked ? this.picked.indexOf(position) : position;
  }

  /** Which piece of its whole group a rank's group is at this level; null for whole groups. */
  pieceOf(rank: number): number | null {
    return this.level ? this.#locate(rank).group % this.#pieces : null;
  }

  /** The coordinate that all members of a rank's group agree on. */
  coordinateOf(rank: number): [string, number][] {
    const digits = digitsOf(this.bases, this.rankRange.position(rank));
    return this.fixed.map((name, place) => [name, digits[place]]);
  }

  /** One member of one group, by its position. */
  member(index: number, position: number): number {
    const base = valueAt(this.bases, Math.floor(index / this.#pieces));
    const piece = index % this.#pieces;
    const { stride, width } = this.level ?? { stride: 1, width: 1 };
    const start = this.level ? Math.floor(piece / stride) * stride * width + (piece % stride) : 0;
    const place = this.picked ? this.picked[position] : position;
    return this.rankRange.rank(base + valueAt(this.members, start + place * stride));
  }

  /** The members of one group, in the order of their positions; the first `most` of them. */
  group(index: number, most = this.size): number[] {
    return Array.from({ length: Math.min(most, this.size) }, (_, position) => this.member(index, position));
  }

  /** How far each member is from the first one, in positions; the same in every group but those of a level. */
  steps(): number[] {
    const places = this.picked ?? Array.from({ length: this.size }, (_, position) => position);
    const first = valueAt(this.members, places[0]);
    return places.map((place) => valueAt(this.members, place) - first);
  }

  /** The members of a rank's group, or null where a pick leaves the rank out. */
  of(rank: number): number[] | null {
    return this.has(rank) ? this.group(this.indexOf(rank)) : null;
  }

  /** All members, group after group. */
  array(): Int32Array {
    this.#array ??= this.#listed(values(this.bases));
    return this.#array;
  }

  /** The members of the groups of the first base, group after group. */
  ofFirstBase(): Int32Array {
    return this.#array?.subarray(0, this.#pieces * this.size) ?? this.#listed(Int32Array.of(0));
  }

  #listed(bases: Int32Array): Int32Array {
    const members = values(this.members);
    const { size, picked } = this;
    const { map, offset } = this.rankRange;
    const { stride, width } = this.level ?? { stride: 1, width: 1 };
    const found = new Int32Array(bases.length * this.#pieces * size);
    let next = 0;
    for (const base of bases)
      for (let piece = 0; piece < this.#pieces; piece++) {
        const start = this.level ? Math.floor(piece / stride) * stride * width + (piece % stride) : 0;
        for (let place = 0; place < size; place++) {
          const position = base + members[start + (picked ? picked[place] : place) * stride];
          found[next++] = map ? map[position] : offset + position;
        }
      }
    return found;
  }

  /** The number of the group of each rank of the span, -1 where a pick leaves it out. */
  index(): Int32Array {
    if (this.#index) return this.#index;
    const array = this.array();
    const { size } = this;
    const found = new Int32Array(this.rankRange.size).fill(-1);
    for (let place = 0; place < array.length; place++)
      found[array[place] - this.rankRange.offset] = Math.floor(place / size);
    this.#index = found;
    return found;
  }

  /** What makes two kinds of one mesh the same groups on every rank. */
  get partition(): string {
    const shortest = coalesced(this.members);
    const { level } = this;
    const members = level ? (between(shortest, level.stride, level.width) ?? [shortest, level]) : shortest;
    const whole = !this.picked || (this.picked.length === this.width && this.picked.every((at, place) => at === place));
    return JSON.stringify([members, whole ? null : this.picked]);
  }
}
