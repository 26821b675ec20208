/**
 * Which communicator the groups of each kind use: their own, that of an earlier kind with the same members, or none.
 */
import type { Groups } from "./groups";
import { optionsKey, type Plan } from "./plan";

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

export function useText({ separate, single, shares }: Use): string {
  const none = single ? ["none needed"] : [];
  if (!shares.length) return [...none, ...(separate ? ["own"] : [])].join(", ");
  if (!separate && shares.length === 1) return `shares ${shares[0][0]}`;
  return [
    ...none,
    ...(separate ? [`own (${separate})`] : []),
    ...shares.map(([kind, groups]) => `shares ${kind} (${groups})`),
  ].join(", ");
}

export function communicators(plan: Plan): Communicators {
  const perRank = new Int16Array(plan.mesh.size);
  const kinds = new Map<string, Use>();
  let [everywhere, total] = [0, 0];
  plan.specs.forEach((each, number) => {
    const groups = plan.groups(each.name);
    const single = groups.size === 1;
    const canonical = single ? [] : canonicalOf(plan, number);
    kinds.set(each.name, useOf(plan, groups, canonical));
    if (single) return;
    total += kinds.get(each.name)!.separate;
    if (!canonical.length && !groups.picked) everywhere++;
    else if (kinds.get(each.name)!.separate) addSeparate(perRank, groups, canonical);
  });
  const [least, most] = range(perRank);
  return { kinds, least: least + everywhere, most: most + everywhere, total };
}

/** For each group of a kind the number of the kind that leads it, -1 for its own; an empty list where nobody leads any. */
function canonicalOf(plan: Plan, number: number): Int32Array | number[] {
  const each = plan.specs[number];
  const groups = plan.groups(each.name);
  if (each.options?.share === false) return [];
  let found: Int32Array | null = null;
  for (let earlier = 0; earlier < number; earlier++) {
    const other = plan.specs[earlier];
    if (plan.groups(other.name).size !== groups.size || optionsKey(other) !== optionsKey(each)) continue;
    const same = sameGroups(plan, other.name, each.name);
    if (!same) continue;
    found ??= new Int32Array(groups.count).fill(-1);
    for (let group = 0; group < found.length; group++)
      if (found[group] < 0 && (same === true || same[group])) found[group] = earlier;
    if (same === true) break;
  }
  return found ?? [];
}

/** Which groups of `name` are groups of `one`, in the same order: true for all, null for none. */
function sameGroups(plan: Plan, one: string, name: string): Uint8Array | true | null {
  if (plan.partition(one) === plan.partition(name)) return true;
  const [ours, theirs] = [plan.groups(one), plan.groups(name)];
  if (!ours.picked && !ours.level && !theirs.picked && !theirs.level) return null;
  if (!ours.level && !theirs.level && ours.steps().join() !== theirs.steps().join()) return null;
  return rowsThatMatch(ours, theirs);
}

/** For each group of `theirs` whether it is a group of `ours`; both of one size and span. */
export function rowsThatMatch(ours: Groups, theirs: Groups): Uint8Array {
  const [index, left, right] = [ours.index(), ours.array(), theirs.array()];
  const { size } = theirs;
  const { offset } = ours.rankRange;
  const same = new Uint8Array(theirs.count);
  for (let group = 0; group < same.length; group++) {
    const row = index[right[group * size] - offset] ?? -1;
    let place = 0;
    if (row >= 0) while (place < size && left[row * size + place] === right[group * size + place]) place++;
    same[group] = Number(place === size);
  }
  return same;
}

function useOf(plan: Plan, groups: Groups, canonical: ArrayLike<number>): Use {
  const { count } = groups;
  if (groups.size === 1) return { separate: 0, single: count, shares: [] };
  const counts = new Map<number, number>();
  for (const first of Array.from(canonical)) {
    if (first >= 0) counts.set(first, (counts.get(first) ?? 0) + 1);
  }
  const shares = [...counts]
    .sort(([a], [b]) => a - b)
    .map(([number, times]) => [plan.specs[number].name, times] as const);
  return {
    separate: count - shares.reduce((total, [, times]) => total + times, 0),
    single: 0,
    shares,
  };
}

/** One more communicator for each member of a group that leads itself. */
function addSeparate(perRank: Int16Array, groups: Groups, canonical: ArrayLike<number>): void {
  const array = groups.array();
  const { size } = groups;
  for (let group = 0; group < groups.count; group++) {
    if (canonical.length && canonical[group] >= 0) continue;
    for (let place = group * size; place < (group + 1) * size; place++)
      perRank[array[place] - groups.rankRange.offset]++;
  }
}

function range(numbers: Int16Array): [number, number] {
  let [least, most] = [numbers[0], numbers[0]];
  for (const number of numbers) {
    if (number < least) least = number;
    if (number > most) most = number;
  }
  return [least, most];
}
