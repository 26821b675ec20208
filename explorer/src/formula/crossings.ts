/**
 * How the groups of one kind lie on a cluster: a group is a ring, and a hop that leaves a host is counted.
 */
import type { Cluster } from "./cluster";
import type { Groups } from "./groups";
import { sizeOf } from "./strided";

export interface Crossings {
  readonly groups: number;
  /** Groups with members on more than one host. */
  readonly crossing: number;
  /** The most hosts that one group touches. */
  readonly nodes: number;
  /** The most hops between hosts in one group's ring. */
  readonly hops: number;
  /** How many groups end at each level. */
  readonly reach: readonly number[];
}

export function crossings(groups: Groups, cluster: Cluster): Crossings {
  const { size } = groups;
  const equal = allEqual(groups, cluster);
  const times = equal ? sizeOf(groups.bases) : 1;
  const count = groups.count / times;
  const ranks = equal ? groups.ofFirstBase() : groups.array();
  const hosts = cluster.units[0];
  const seen = new Int32Array(cluster.devices.length).fill(-1);
  const reach = cluster.levels.map(() => 0);
  const found = { crossing: 0, nodes: 0, hops: 0 };
  for (let group = 0; group < count; group++) {
    const start = group * size;
    let [nodes, hops] = [0, 0];
    let before = hosts[ranks[start + size - 1]];
    for (let place = start; place < start + size; place++) {
      const host = hosts[ranks[place]];
      if (host !== before) hops++;
      before = host;
      if (seen[host] === group) continue;
      seen[host] = group;
      nodes++;
    }
    if (nodes > 1) found.crossing++;
    found.nodes = Math.max(found.nodes, nodes);
    found.hops = Math.max(found.hops, hops);
    reach[nodes > 1 ? level(ranks, start, size, cluster) : 0]++;
  }
  const { crossing, nodes, hops } = found;
  return { groups: count * times, crossing: crossing * times, nodes, hops, reach: reach.map((each) => each * times) };
}

/**
 * Whether the groups lie alike whatever their base: units of all sizes end where a digit of an axis ends, so that a base
 * moves a group from units to units.
 */
function allEqual(groups: Groups, cluster: Cluster): boolean {
  const sizes = cluster.even;
  if (!sizes || groups.rankRange.map || groups.rankRange.offset) return false;
  const pairs = [...groups.members, ...groups.bases];
  return sizes.slice(0, -1).every((unit) => unit >= groups.rankRange.size || pairs.some((pair) => endsIn(pair, unit)));
}

const endsIn = ([size, stride]: readonly [number, number], unit: number): boolean =>
  unit % stride === 0 && size % (unit / stride) === 0;

/** The innermost level that holds the members from `start` on. */
function level(ranks: Int32Array, start: number, size: number, cluster: Cluster): number {
  for (let number = 1; number < cluster.levels.length - 1; number++) {
    const units = cluster.units[number];
    const unit = units[ranks[start]];
    let place = start + 1;
    while (place < start + size && units[ranks[place]] === unit) place++;
    if (place === start + size) return number;
  }
  return cluster.levels.length - 1;
}
