/**
 * The span of a mesh: the ranks that it covers, and the order in which it takes them.
 *
 *     rank = offset + position          rank = map[position]   with a rank map
 */
import { layoutError, quoted } from "./messages";

export class RankRange {
  #inverse: Int32Array | null = null;

  private constructor(
    readonly offset: number,
    readonly size: number,
    readonly map: Int32Array | null,
  ) {}

  /** A checked span; the identity map is no map. */
  static of(offset: number, size: number, map: readonly number[] | null = null): RankRange {
    if (map === null) return new RankRange(offset, size, null);
    const seen = new Set(map);
    const fits =
      map.length === size && seen.size === size && map.every((rank) => rank >= offset && rank < offset + size);
    if (!fits)
      throw layoutError(
        `rank_map ${quoted(map)} has ${map.length} entries for a mesh of ${size} ranks from ${offset}; list each of ` +
          `ranks ${offset} to ${offset + size - 1} exactly once, in the order of positions`,
      );
    const same = map.every((rank, position) => rank === offset + position);
    return new RankRange(offset, size, same ? null : Int32Array.from(map));
  }

  get stop(): number {
    return this.offset + this.size;
  }

  has(rank: number): boolean {
    return rank >= this.offset && rank < this.stop;
  }

  rank(position: number): number {
    return this.map ? this.map[position] : this.offset + position;
  }

  position(rank: number): number {
    if (!this.has(rank))
      throw layoutError(
        `rank ${rank} is outside this mesh, which covers ranks ${this.offset} to ${this.stop - 1}; ` +
          "ask for a rank inside, or set the mesh's offset and sizes to cover it",
      );
    if (!this.map) return rank - this.offset;
    if (!this.#inverse) {
      const inverse = new Int32Array(this.size);
      this.map.forEach((other, position) => (inverse[other - this.offset] = position));
      this.#inverse = inverse;
    }
    return this.#inverse[rank - this.offset];
  }

  equals(other: RankRange): boolean {
    if (this.offset !== other.offset || this.size !== other.size) return false;
    if (!this.map || !other.map) return this.map === other.map;
    return this.map.every((rank, position) => rank === other.map![position]);
  }
}
