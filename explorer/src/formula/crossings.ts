/**
 * How the groups of one kind lie on a cluster: a group is a ring, and a hop that leaves a host is counted.
 */
import type { Cluster } from "./cluster";
import type { Groups } from "./groups";

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
  const ranks = groups.array();
  const { size } = groups;
  const count = ranks.length / size;
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
  return { groups: count, ...found, reach };
}

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
