/**
 * Meshes: named axes laid over a contiguous span of global ranks.
 *
 *     rank = offset + Σ coordinate[a] · stride[a]        stride[a] = Π sizes of the axes before a
 *
 * Experts see the same ranks through another factorisation, a view, whose shared axes are proved equal.
 */
import { axisName, axisNames, axisSize, fill, find, integer, parseAxes, product, times, type Sizes } from "./axes";
import { Groups } from "./groups";
import { RankRange } from "./rank_range";
import { coalesced, dense, digitsOf, type Pairs } from "./strided";
import { layoutError, listed, repr } from "./messages";

/** A mesh as a saved plan has it. */
export interface MeshData {
  axes: [string, number][];
  offset: number;
  rank_map?: number[];
  parts?: Record<string, string[]>;
  views?: Record<string, { axes: [string, number][]; parts?: Record<string, string[]> }>;
}

export class Mesh {
  readonly pairs: Pairs;

  private constructor(
    readonly sizes: Sizes,
    readonly rankRange: RankRange,
    readonly parts: ReadonlyMap<string, readonly string[]> = new Map(),
    readonly views: ReadonlyMap<string, Mesh> = new Map(),
  ) {
    this.pairs = dense(sizes.values());
  }

  static of(sizes: Iterable<readonly [string, number]>, offset = 0, map: readonly number[] | null = null): Mesh {
    const checked = new Map([...sizes].map(([name, size]) => [axisName(name), axisSize(name, size)]));
    if (!checked.size) throw layoutError("the mesh has no axes; give at least one, such as Mesh(dp=8)");
    return new Mesh(checked, RankRange.of(offset, product(checked.values()), map));
  }

  static parse(text: string, worldSize: number | null = null): Mesh {
    const total = worldSize === null ? null : integer(worldSize, "world_size", 1);
    return Mesh.of(fill(parseAxes(text), total, "world_size"));
  }

  static from(data: MeshData): Mesh {
    const map = data.rank_map ?? null;
    const mesh = Mesh.of(data.axes, data.offset, map);
    const views = Object.entries(data.views ?? {}).map(([name, view]): [string, Mesh] => {
      factors(name, new Map(view.axes), mesh.size);
      const other = Mesh.of(view.axes, data.offset, map);
      return [name, new Mesh(other.sizes, mesh.rankRange, new Map(Object.entries(view.parts ?? {})))];
    });
    return new Mesh(mesh.sizes, mesh.rankRange, new Map(Object.entries(data.parts ?? {})), new Map(views));
  }

  get size(): number {
    return this.rankRange.size;
  }

  get names(): string[] {
    return [...this.sizes.keys()];
  }

  strideOf(axis: string): number {
    return this.pairs[this.names.indexOf(axis)][1];
  }

  view(name: string | null): Mesh {
    if (name === null) return this;
    return this.views.get(find(name, [...this.views.keys()], "view"))!;
  }

  /** The position of a rank along each axis, in their order. */
  coordinate(rank: number, view: string | null = null): Map<string, number> {
    const mesh = this.view(view);
    const digits = digitsOf(mesh.pairs, this.rankRange.position(rank));
    return new Map(mesh.names.map((name, place) => [name, digits[place]]));
  }

  /** All groups along a set of axes; members in the order of the mesh. */
  groups(axes: string | readonly string[], view: string | null = null): Groups {
    const mesh = this.view(view);
    const named = mesh.#leaves(axisNames(axes));
    const pairs = mesh.names.map((name, place) => [name, mesh.pairs[place]] as const);
    const along = pairs.filter(([name]) => named.includes(name));
    const across = pairs.filter(([name]) => !named.includes(name));
    return new Groups(
      this.rankRange,
      along.map(([name]) => name),
      along.map(([, pair]) => pair),
      across.map(([name]) => name),
      across.map(([, pair]) => pair),
    );
  }

  /** The names with every split axis replaced by its sub-axes. */
  #leaves(names: readonly string[]): string[] {
    const known = [...this.names, ...this.parts.keys()];
    return axisNames(
      names.flatMap((name) => (this.parts.has(name) ? this.#leaves(this.parts.get(name)!) : [find(name, known)])),
    );
  }

  /** The mesh with one more factorisation of its span; `shared` axes (null: all that both name) are proved equal. */
  withView(name: string, sizes: Sizes, shared: readonly string[] | null = null): Mesh {
    const view = Mesh.of(
      factors(name, sizes, this.size),
      this.rankRange.offset,
      this.rankRange.map && [...this.rankRange.map],
    );
    if (this.views.has(axisName(name)))
      throw layoutError(`the mesh has a view ${repr(name)} already; give the second one another name`);
    const known = [...this.names, ...this.parts.keys()];
    for (const axis of shared ?? view.names.filter((other) => known.includes(other))) {
      find(axis, known);
      find(axis, view.names);
      this.#checkEqual(view, name, axis);
    }
    return new Mesh(this.sizes, this.rankRange, this.parts, new Map([...this.views, [name, view]]));
  }

  #checkEqual(view: Mesh, name: string, axis: string): void {
    const ours = this.groups(axis);
    const theirs = view.groups(axis);
    if (JSON.stringify(coalesced(ours.members)) !== JSON.stringify(coalesced(theirs.members)))
      throw layoutError(
        `view ${repr(name)} shares ${repr(axis)} with the mesh, but its groups differ: the mesh has ` +
          `${listed(ours.group(0))}, the view has ${listed(theirs.group(0))}; give ${repr(axis)} one size and one ` +
          "stride in both, or leave it out of shared",
      );
  }

  /** The mesh with one axis of a view replaced by sub-axes, the first adjacent. */
  splitView(view: string, axis: string, sizes: Sizes): Mesh {
    const old = this.view(view);
    const filled = fill(sizes, old.sizes.get(find(axis, old.names))!, `size of axis ${repr(axis)}`);
    const leaves = [...old.sizes].flatMap(([name, size]) => (name === axis ? [...filled] : [[name, size] as const]));
    const parts = new Map([...old.parts, [axis, [...filled.keys()]]]);
    const split = new Mesh(new Map(leaves), this.rankRange, parts);
    return new Mesh(this.sizes, this.rankRange, this.parts, new Map([...this.views, [view, split]]));
  }

  /** The axis string. */
  toString(): string {
    return [...this.sizes].map(([name, size]) => `${name}=${size}`).join(",");
  }
}

/** The checked sizes of a view, whose product must be that of the mesh. */
function factors(name: string, sizes: Sizes, total: number): Map<string, number> {
  const checked = new Map([...sizes].map(([axis, size]) => [axisName(axis), axisSize(axis, size)]));
  const found = product(checked.values());
  if (found !== total)
    throw layoutError(
      `view ${repr(name)} has ${times(checked)} = ${found} ranks, but the mesh has ${total}; change its sizes, as a view ` +
        "is another factorisation of the same ranks",
    );
  return checked;
}
