/**
 * Which communicators each kind uses: its own, those of an earlier kind with the same groups and options, or none.
 */
import type { Plan } from "./plan";

/** The groups of one kind by what they use. */
export interface Use {
  readonly separate: number;
  readonly single: number;
  readonly shares: readonly (readonly [string, number])[];
}

export interface Communicators {
  readonly kinds: ReadonlyMap<string, Use>;
  readonly least: number;
  readonly most: number;
  readonly total: number;
}

export function useText({ single, shares }: Use): string {
  if (shares.length) return `shares ${shares[0][0]}`;
  return single ? "none needed" : "own";
}

export function communicators(plan: Plan): Communicators {
  const perRank = new Int16Array(plan.mesh.size);
  const kinds = new Map<string, Use>();
  let total = 0;
  for (const { name } of plan.specs) {
    const groups = plan.groups(name);
    const canonical = plan.canonical(name);
    const { count } = groups;
    if (groups.size === 1) kinds.set(name, { separate: 0, single: count, shares: [] });
    else if (canonical !== name) kinds.set(name, { separate: 0, single: 0, shares: [[canonical, count]] });
    else {
      kinds.set(name, { separate: count, single: 0, shares: [] });
      total += count;
      for (const rank of groups.array()) perRank[rank - groups.rankRange.offset]++;
    }
  }
  const [least, most] = range(perRank);
  return { kinds, least, most, total };
}

function range(numbers: Int16Array): [number, number] {
  let [least, most] = [numbers[0], numbers[0]];
  for (const number of numbers) {
    if (number < least) least = number;
    if (number > most) most = number;
  }
  return [least, most];
}
