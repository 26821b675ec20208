/**
 * What each rank looks like: the group that it is in, the kinds that it shares with the rank that is pointed at, what
 * was measured, who hangs. Aggregates look like the ranks that they stand for.
 */
import type { Colours } from "./colours";
import { groupColour, hueOf, kindColour } from "./colours";
import type { Hang, Measured, Speed } from "./given";
import type { Model } from "./model";

/** How one rank, or a block of ranks, is filled: stripes of equal width, and the colour of text on them. */
export interface Look {
  readonly stripes: readonly string[];
  readonly ink: string;
  /** A block of more groups than stripes; the colour is that of its first group. */
  readonly many?: boolean;
  /** A second line on a cell that is large enough. */
  readonly note?: string;
}

export interface Scene {
  readonly model: Model;
  readonly colours: Colours;
  of(rank: number): Look;
  /** A block of ranks, those of the slots from `start` to `stop`. */
  block(rankAt: Int32Array, start: number, stop: number): Look;
  /** The rank that is pointed at, the pins, and pairs of ranks that lines join, each with a colour. */
  readonly focus: number | null;
  readonly pins: readonly number[];
  readonly lines: readonly Line[];
  /** 1 for each rank that compares unequal. */
  readonly changed: Uint8Array | null;
}

export interface Line {
  readonly ranks: readonly number[];
  readonly colour: string;
  readonly closed: boolean;
  readonly heavy: boolean;
  /** Whether an arrow stands at its end. */
  readonly arrow: boolean;
}

const STRIPES = 4;

abstract class Base implements Scene {
  readonly focus: number | null = null;
  readonly pins: readonly number[];
  lines: readonly Line[] = [];
  changed: Uint8Array | null = null;

  constructor(
    readonly model: Model,
    readonly colours: Colours,
    pins: readonly number[],
  ) {
    this.pins = pins;
  }

  abstract of(rank: number): Look;

  /** The stripes of the first few different looks. */
  block(rankAt: Int32Array, start: number, stop: number): Look {
    const stripes: string[] = [];
    for (let slot = start; slot < stop && stripes.length < STRIPES; slot++) {
      const rank = rankAt[slot];
      if (rank < 0 || !this.model.has(rank)) continue;
      const [fill] = this.of(rank).stripes;
      if (!stripes.includes(fill)) stripes.push(fill);
    }
    return {
      stripes: stripes.length ? stripes : [this.colours.place[1]],
      ink: this.colours.ink,
    };
  }

  protected outside(): Look {
    return { stripes: [this.colours.place[1]], ink: this.colours.soft };
  }
}

/** Each group of one kind in a colour. */
export class GroupsScene extends Base {
  readonly #index: Int32Array;
  readonly #looks: readonly Look[];

  constructor(model: Model, colours: Colours, pins: readonly number[], kind: string) {
    super(model, colours, pins);
    this.#index = model.plan.groups(kind).index();
    this.#looks = colours.groups.map((fill) => ({ stripes: [fill], ink: colours.ink }));
  }

  of(rank: number): Look {
    const group = this.#index[rank - this.model.plan.mesh.rankRange.offset] ?? -1;
    return group < 0 ? this.outside() : { ...this.#looks[hueOf(group)], note: `g${group}` };
  }

  override block(rankAt: Int32Array, start: number, stop: number): Look {
    const { offset } = this.model.plan.mesh.rankRange;
    const seen: number[] = [];
    for (let slot = start; slot < stop && seen.length <= STRIPES; slot++) {
      const group = rankAt[slot] < 0 ? -1 : this.#index[rankAt[slot] - offset];
      if (group >= 0 && !seen.includes(group)) seen.push(group);
    }
    const many = seen.length > STRIPES;
    const stripes = (many ? seen.slice(0, 1) : seen).map((group) => groupColour(this.colours, group));
    return { stripes: stripes.length ? stripes : [this.colours.place[1]], ink: this.colours.ink, many };
  }
}

/** What a search found keeps its colours, the rest fades. */
export class FoundScene extends GroupsScene {
  constructor(
    model: Model,
    colours: Colours,
    pins: readonly number[],
    kind: string,
    readonly found: ReadonlySet<number>,
  ) {
    super(model, colours, pins, kind);
  }

  override of(rank: number): Look {
    return this.found.has(rank)
      ? { stripes: [this.colours.kinds[0]], ink: this.colours.onKind }
      : { stripes: [this.colours.cell], ink: this.colours.soft };
  }

  override block(rankAt: Int32Array, start: number, stop: number): Look {
    const some = rankAt.subarray(start, stop).some((rank) => this.found.has(rank));
    return {
      stripes: [some ? this.colours.kinds[0] : this.colours.cell],
      ink: this.colours.ink,
    };
  }
}

/** The ranks that share a group with one rank, by kind. */
export class FocusScene extends Base {
  override readonly focus: number;
  readonly #marks: Uint32Array;

  constructor(
    model: Model,
    colours: Colours,
    pins: readonly number[],
    rank: number,
    readonly kinds: readonly string[],
  ) {
    super(model, colours, pins);
    this.focus = rank;
    this.#marks = new Uint32Array(model.plan.worldSize);
    kinds.forEach((kind, place) => {
      const local = model.has(rank) ? model.plan.groups(kind).of(rank) : null;
      for (const other of local ?? []) this.#marks[other] |= 1 << place;
    });
  }

  #colours(marks: number): string[] {
    return this.kinds.flatMap((_, place) => (marks & (1 << place) ? [kindColour(this.colours, place)] : []));
  }

  of(rank: number): Look {
    if (rank === this.focus) return { stripes: [this.colours.focus], ink: this.colours.onFocus };
    const marks = this.#marks[rank];
    if (!marks) return { stripes: [this.colours.cell], ink: this.colours.soft };
    return { stripes: this.#colours(marks), ink: this.colours.onKind };
  }

  override block(rankAt: Int32Array, start: number, stop: number): Look {
    let marks = 0;
    let here = false;
    for (let slot = start; slot < stop; slot++) {
      if (rankAt[slot] < 0) continue;
      marks |= this.#marks[rankAt[slot]];
      here ||= rankAt[slot] === this.focus;
    }
    const stripes = [...(here ? [this.colours.focus] : []), ...(marks ? this.#colours(marks) : [])];
    return {
      stripes: stripes.length ? stripes.slice(0, STRIPES) : [this.colours.cell],
      ink: this.colours.ink,
    };
  }
}

/** The bandwidth that each group of a kind had, from pale to full. */
export class MeasuredScene extends Base {
  readonly #index: Int32Array;
  readonly #looks: Look[];

  constructor(model: Model, colours: Colours, pins: readonly number[], kind: string, measured: Measured) {
    super(model, colours, pins);
    const groups = model.plan.groups(kind);
    this.#index = groups.index();
    const speeds = speedsOf(measured, kind, groups.count);
    const most = Math.max(...speeds.filter((speed) => speed !== null), 0);
    this.#looks = speeds.map((speed) =>
      speed === null
        ? this.outside()
        : {
            stripes: [colours.scale(speed / most)],
            ink: colours.ink,
            note: speedText(speed),
          },
    );
  }

  of(rank: number): Look {
    const group = this.#index[rank - this.model.plan.mesh.rankRange.offset] ?? -1;
    return this.#looks[group] ?? this.outside();
  }
}

/** Bus bandwidth of each group, bytes/s, at the largest size; null where it was not measured. */
export function speedsOf(measured: Measured, kind: string, count: number): (number | null)[] {
  const rows = measured.kinds.filter((row) => row.name === kind);
  const row = rows.reduce<(typeof rows)[number] | undefined>(
    (best, each) => (best && best.bytes >= each.bytes ? best : each),
    undefined,
  );
  if (!row) return Array.from({ length: count }, () => null);
  return Array.from({ length: count }, (_, group) => {
    const seconds = row.groups?.[group] ?? row.seconds;
    return (row.busbw * row.seconds) / seconds;
  });
}

export function speedText(speed: number): string {
  const [unit, size] = (
    [
      ["GB/s", 1e9],
      ["MB/s", 1e6],
      ["kB/s", 1e3],
    ] as const
  ).find(([, least]) => speed >= least) ?? ["B/s", 1];
  return `${Number((speed / size).toPrecision(3))} ${unit}`;
}

/** Who is named as a cause, who waits. */
export class HangScene extends Base {
  readonly #causes: ReadonlyMap<number, string>;
  readonly #waiting: ReadonlySet<number>;

  constructor(model: Model, colours: Colours, pins: readonly number[], hang: Hang) {
    super(model, colours, pins);
    this.#causes = new Map(
      hang.causes.flatMap((cause) => cause.ranks.map((rank) => [rank, cause.cause] as const)).reverse(),
    );
    this.#waiting = new Set(hang.waiting);
  }

  of(rank: number): Look {
    const { colours } = this;
    const cause = this.#causes.get(rank);
    if (cause !== undefined) return { stripes: [colours.cause], ink: colours.onKind, note: cause };
    if (this.#waiting.has(rank)) return { stripes: [colours.waits], ink: colours.ink, note: "waits" };
    return { stripes: [colours.cell], ink: colours.soft };
  }

  override block(rankAt: Int32Array, start: number, stop: number): Look {
    const ranks = Array.from(rankAt.subarray(start, stop)).filter((rank) => rank >= 0);
    const stripes = [
      ...(ranks.some((rank) => this.#causes.has(rank)) ? [this.colours.cause] : []),
      ...(ranks.some((rank) => this.#waiting.has(rank)) ? [this.colours.waits] : []),
    ];
    return {
      stripes: stripes.length ? stripes : [this.colours.cell],
      ink: this.colours.ink,
    };
  }
}

/** Shares of a step from which a rank has the next colour. */
export const SHARES = [0.02, 0.05, 0.1, 0.3];

/** How long others wait for each rank; a block looks like its slowest. */
export class SlowScene extends Base {
  constructor(
    model: Model,
    colours: Colours,
    pins: readonly number[],
    readonly speed: Speed,
  ) {
    super(model, colours, pins);
  }

  of(rank: number): Look {
    return rank in this.speed.caused ? this.#look(this.speed.caused[rank]) : this.outside();
  }

  override block(rankAt: Int32Array, start: number, stop: number): Look {
    let most = 0;
    for (let slot = start; slot < stop; slot++) most = Math.max(most, this.speed.caused[rankAt[slot]] ?? 0);
    return this.#look(most);
  }

  #look(seconds: number): Look {
    const level = SHARES.filter((share) => seconds >= share * this.speed.step).length;
    const ink = level > 2 ? this.colours.onKind : this.colours.ink;
    return { stripes: [this.colours.heat[level]], ink, note: `${Number((1000 * seconds).toPrecision(2))} ms` };
  }
}
