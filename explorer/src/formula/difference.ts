/**
 * What differs between two plans, rank by rank: the facts of `rankmesh diff`.
 */
import type { Groups } from "./groups";
import type { Plan } from "./plan";

export interface KindDifference {
  readonly name: string;
  /** How many ranks see another group. */
  readonly ranks: number;
  readonly leftSize: number;
  readonly rightSize: number;
}

export interface Difference {
  readonly axes: readonly {
    view: string | null;
    axis: string;
    left: string | null;
    right: string | null;
  }[];
  readonly onlyLeft: readonly string[];
  readonly onlyRight: readonly string[];
  readonly groups: readonly KindDifference[];
  readonly equal: readonly string[];
}

export function difference(left: Plan, right: Plan): Difference {
  const common = [...left.kinds.keys()].filter((name) => right.kinds.has(name));
  const found = common.map((name) => {
    const [ours, theirs] = [left.groups(name), right.groups(name)];
    const changed = changedRanks(ours, theirs, Math.max(left.worldSize, right.worldSize));
    return {
      name,
      ranks: changed.reduce((total, each) => total + each, 0),
      leftSize: ours.size,
      rightSize: theirs.size,
    };
  });
  return {
    axes: axesThatDiffer(left, right),
    onlyLeft: [...left.kinds.keys()].filter((name) => !right.kinds.has(name)),
    onlyRight: [...right.kinds.keys()].filter((name) => !left.kinds.has(name)),
    groups: found.filter((kind) => kind.ranks),
    equal: found.filter((kind) => !kind.ranks).map((kind) => kind.name),
  };
}

/** For each rank of the world 1 where it sees another group. */
export function changedRanks(left: Groups, right: Groups, world: number): Uint8Array {
  const changed = new Uint8Array(world);
  if (left.rankRange.equals(right.rankRange) && left.partition === right.partition) return changed;
  const same = left.size === right.size ? rowsThatMatch(right, left) : new Uint8Array(left.count);
  const [ours, theirs] = [left.index(), right.index()];
  for (let rank = 0; rank < world; rank++) {
    const here = ours[rank - left.rankRange.offset] ?? -1;
    const there = theirs[rank - right.rankRange.offset] ?? -1;
    const absent = here < 0 && there < 0;
    changed[rank] = Number(!absent && !(here >= 0 && same[here]));
  }
  return changed;
}

function axesThatDiffer(left: Plan, right: Plan): Difference["axes"] {
  const views = [null, ...new Set([...left.mesh.views.keys(), ...right.mesh.views.keys()])];
  return views.flatMap((view) => {
    const [ours, theirs] = [pairs(left, view), pairs(right, view)];
    return [...new Set([...ours.keys(), ...theirs.keys()])]
      .map((axis) => ({
        view,
        axis,
        left: ours.get(axis) ?? null,
        right: theirs.get(axis) ?? null,
      }))
      .filter((row) => row.left !== row.right);
  });
}

/** Size and stride of each axis, in words: `4 by 8`. */
function pairs(plan: Plan, view: string | null): Map<string, string> {
  if (view !== null && !plan.mesh.views.has(view)) return new Map();
  const mesh = plan.mesh.view(view);
  return new Map([...mesh.sizes].map(([axis, size]) => [axis, `${size} by ${mesh.strideOf(axis)}`]));
}

/** For each group of `theirs` whether it is a group of `ours`; both of one size and span. */
function rowsThatMatch(ours: Groups, theirs: Groups): Uint8Array {
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
