/**
 * Plans: the ordered, named groups that one job wants.
 *
 *     Mesh + specs  ->  kinds by name, which of them share a communicator, and the groups of one rank
 */
import { integer } from "./axes";
import type { Groups } from "./groups";
import { Mesh, type MeshData } from "./mesh";
import { planError, quoted, unknownGroup } from "./messages";

export type Options = Readonly<Record<string, unknown>>;

/** What one kind of group is called, which axes it spans, and what narrows it: a group spec of a saved plan. */
export interface Spec {
  readonly name: string;
  readonly axes: readonly string[];
  readonly view?: string;
  readonly pick?: readonly number[];
  readonly levels?: readonly number[];
  readonly level?: number;
  readonly options?: Options;
}

/** A plan as `rankmesh show --save` writes it. */
export interface PlanData {
  mesh: MeshData;
  groups: Spec[];
  world_size?: number;
  name?: string;
}

/** One group as one of its members sees it; nobody is listed. */
export interface Local {
  readonly name: string;
  readonly groups: Groups;
  /** The number of the group among those of its kind, and the place of the rank in it. */
  readonly index: number;
  readonly rank: number;
  /** Kind and coordinate, slowest first: `tp@pp1,dp5`. */
  readonly label: string;
  /** The kind whose communicator serves this group; null for a group of one rank. */
  readonly communicator: string | null;
}

export const spec = (
  name: string,
  axes?: string | readonly string[],
  more: Omit<Spec, "name" | "axes"> = {},
): Spec => ({
  name,
  axes: axes === undefined ? name.split("-") : typeof axes === "string" ? axes.split("-") : axes,
  ...more,
});

export class Plan {
  readonly kinds: ReadonlyMap<string, Groups>;
  readonly worldSize: number;
  #partitions = new Map<string, string>();
  #canonical?: Map<string, string>;

  constructor(
    readonly mesh: Mesh,
    readonly specs: readonly Spec[],
    worldSize: number | null = null,
  ) {
    if (worldSize !== null && mesh.rankRange.stop > integer(worldSize, "world_size", 1))
      throw planError(
        `the mesh covers ranks ${mesh.rankRange.offset} to ${mesh.rankRange.stop - 1}, more than a world of ${worldSize} has; lower ` +
          `its offset or a size, or raise world_size to ${mesh.rankRange.stop}`,
      );
    this.worldSize = worldSize ?? mesh.rankRange.stop;
    this.kinds = new Map(specs.map((each) => [each.name, groupsOf(each, mesh)]));
  }

  static from(data: PlanData): Plan {
    return new Plan(Mesh.from(data.mesh), data.groups, data.world_size ?? null);
  }

  groups(name: string): Groups {
    const found = this.kinds.get(name);
    if (!found) throw unknownGroup(name, [...this.kinds.keys()]);
    return found;
  }

  spec(name: string): Spec {
    this.groups(name);
    return this.specs.find((each) => each.name === name)!;
  }

  partition(name: string): string {
    let found = this.#partitions.get(name);
    if (found === undefined) {
      found = this.groups(name).partition;
      this.#partitions.set(name, found);
    }
    return found;
  }

  /** The groups that one rank is in, in the plan's order. */
  of(rank: number): Local[] {
    const found: Local[] = [];
    for (const each of this.specs) {
      const groups = this.groups(each.name);
      if (!groups.has(rank)) continue;
      const index = groups.indexOf(rank);
      found.push({
        name: each.name,
        groups,
        index,
        rank: groups.positionOf(rank),
        label: labelOf(each.name, groups, rank),
        communicator: groups.size === 1 ? null : this.canonical(each.name),
      });
    }
    return found;
  }

  /** The kind whose communicators a kind uses: the first of its class, itself where it is that. */
  canonical(name: string): string {
    this.#canonical ??= new Map(this.sharing.flatMap((names) => names.map((each) => [each, names[0]] as const)));
    return this.#canonical.get(name)!;
  }

  /** The kinds in classes that use one communicator on every rank. */
  get sharing(): string[][] {
    const classes = new Map<string, string[]>();
    for (const each of this.specs) {
      const key = each.options?.share === false ? each.name : `${this.partition(each.name)} ${optionsKey(each)}`;
      classes.set(key, [...(classes.get(key) ?? []), each.name]);
    }
    return [...classes.values()];
  }
}

export const optionsKey = (each: Spec): string => JSON.stringify(Object.entries(each.options ?? {}).sort());

function labelOf(name: string, groups: Groups, rank: number): string {
  const place = groups
    .coordinateOf(rank)
    .reverse()
    .map(([axis, position]) => `${axis}${position}`)
    .join(",");
  const piece = groups.pieceOf(rank);
  const number = piece === null ? "" : `#${piece}`;
  return place || number ? `${name}@${place}${number}` : name;
}

function groupsOf(each: Spec, mesh: Mesh): Groups {
  let groups = mesh.groups(each.axes, each.view ?? null);
  if (each.levels && each.level !== undefined) groups = groups.levelOf(each.levels, each.level);
  return each.pick ? groups.pick(each.pick) : groups;
}

/** The names of picks that have one. */
export function pickText(pick: readonly number[]): string {
  const names: Record<string, string> = {
    "0,-1": "ends",
    "0": "first",
    "-1": "last",
  };
  return names[pick.join(",")] ?? `positions ${pick.join(", ")}`;
}

/** The world size of a plan must be the one that was asked for. */
export function fitting(plan: Plan, shown: string, worldSize: number | null): Plan {
  if (worldSize !== null && plan.worldSize !== worldSize)
    throw planError(
      `${quoted(shown)} is a layout of ${plan.worldSize} ranks, but the world size is ${worldSize}; ` +
        `change the layout, or use world size ${plan.worldSize}`,
    );
  return plan;
}
