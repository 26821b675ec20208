/**
 * Where each rank is drawn: blocks inside blocks.
 *
 *     places   device in host, host in domain, domain under switch          mesh   tp in cp, in dp, in pp
 *
 *     slot = Σ digit[depth] · Π counts of the depths before      rankAt[slot], slotOf[rank]; -1 where nothing stands
 */
import type { Cluster } from "../formula/cluster";
import type { Model } from "./model";
import type { Arrangement } from "./state";

/** One depth of the nest: how many blocks of the depth below lie side by side, and how one of them is called. */
export interface Depth {
  readonly name: string;
  readonly count: number;
  /** The name of the block with this number, counted over the whole world. */
  readonly label: (block: number) => string;
}

export interface Nest {
  /** Innermost first. */
  readonly depths: readonly Depth[];
  readonly slots: number;
  readonly rankAt: Int32Array;
  readonly slotOf: Int32Array;
  /** Which depth's blocks are hosts: 1 for places; null where hosts lie across the blocks or are not known. */
  readonly hosts: number | null;
}

export function nestOf(model: Model, arrange: Arrangement): Nest {
  return arrange === "places" && model.cluster ? places(model, model.cluster) : mesh(model);
}

function mesh(model: Model): Nest {
  const { plan } = model;
  const axes = [...plan.mesh.sizes].filter(([, size]) => size > 1);
  const depths = axes.map(([name, count]) => ({
    name,
    count,
    label: (block: number) => `${name} ${block % count}`,
  }));
  const rankAt = new Int32Array(plan.mesh.size);
  const slotOf = new Int32Array(plan.worldSize).fill(-1);
  for (let slot = 0; slot < rankAt.length; slot++) {
    rankAt[slot] = plan.mesh.rankRange.rank(slot);
    slotOf[rankAt[slot]] = slot;
  }
  const nest = {
    depths: depths.length ? depths : [ONE],
    slots: rankAt.length,
    rankAt,
    slotOf,
  };
  return { ...nest, hosts: model.cluster && hostDepth(nest, model.cluster) };
}

const ONE: Depth = { name: "rank", count: 1, label: () => "" };

/** The depth at which each block is exactly one host. */
function hostDepth(nest: Omit<Nest, "hosts">, cluster: Cluster): number | null {
  const devices = cluster.devices[0];
  let size = 1;
  const depth = nest.depths.findIndex((each) => (size *= each.count) === devices);
  if (depth < 0) return null;
  const hosts = cluster.units[0];
  for (let slot = 0; slot < nest.slots; slot++)
    if (hosts[nest.rankAt[slot]] !== hosts[nest.rankAt[slot - (slot % devices)]]) return null;
  return depth + 1;
}

function places(model: Model, cluster: Cluster): Nest {
  const world = model.plan.worldSize;
  const key = `places ${world}`;
  const known = NESTS.get(cluster);
  if (known?.key === key) return known.nest;
  const nest = placesOf(cluster, world);
  NESTS.set(cluster, { key, nest });
  return nest;
}

// The places of a cluster stay when only the layout changes.
const NESTS = new WeakMap<Cluster, { key: string; nest: Nest }>();

function placesOf(cluster: Cluster, world: number): Nest {
  const used = cluster.lowest.map((ranks) => [...ranks.keys()].filter((unit) => ranks[unit] < world));
  const counts = [
    Math.max(...new Set(cluster.devices)),
    ...cluster.levels.slice(1).map((_, level) => most(cluster, level, used)),
  ];
  const top = used.at(-1)!.length;
  const depths: Depth[] = counts.map((count, level) => {
    const blocks = level ? namesIn(cluster, level - 1, used, counts) : [];
    return { name: level ? cluster.levels[level - 1] : "device", count, label: (block: number) => blocks[block] ?? "" };
  });
  if (top > 1) {
    const blocks = namesIn(cluster, cluster.levels.length - 1, used, counts);
    depths.push({ name: cluster.levels.at(-1)!, count: top, label: (block) => blocks[block] ?? "" });
  }
  return { ...slotsOf(cluster, used, counts, world), depths, hosts: 1 };
}

/** The unit of the level above that each used unit of `level` lies in, and its place there. */
function placed(
  cluster: Cluster,
  level: number,
  used: readonly number[][],
): Map<number, { parent: number; place: number }> {
  const filled = new Map<number, number>();
  return new Map(
    used[level].map((unit) => {
      const parent = cluster.units[level + 1][cluster.lowest[level][unit]];
      const place = filled.get(parent) ?? 0;
      filled.set(parent, place + 1);
      return [unit, { parent, place }];
    }),
  );
}

const most = (cluster: Cluster, level: number, used: readonly number[][]): number =>
  [...placed(cluster, level, used).values()].reduce((found, { place }) => Math.max(found, place + 1), 0);

/** The block number of each used unit of a level, by the places of its ancestors. */
function blocksOf(
  cluster: Cluster,
  level: number,
  used: readonly number[][],
  counts: readonly number[],
): Map<number, number> {
  if (level === cluster.levels.length - 1) return new Map(used[level].map((unit, place) => [unit, place]));
  const above = blocksOf(cluster, level + 1, used, counts);
  const inside = placed(cluster, level, used);
  return new Map(
    used[level].map((unit) => {
      const { parent, place } = inside.get(unit)!;
      return [unit, above.get(parent)! * counts[level + 1] + place];
    }),
  );
}

function namesIn(cluster: Cluster, level: number, used: readonly number[][], counts: readonly number[]): string[] {
  const names: string[] = [];
  for (const [unit, block] of blocksOf(cluster, level, used, counts)) names[block] = cluster.names[level][unit];
  return names;
}

function slotsOf(
  cluster: Cluster,
  used: readonly number[][],
  counts: readonly number[],
  world: number,
): Pick<Nest, "slots" | "rankAt" | "slotOf"> {
  const slots = counts.reduce((total, count) => total * count, used.at(-1)!.length);
  const rankAt = new Int32Array(slots).fill(-1);
  const slotOf = new Int32Array(world).fill(-1);
  const blocks = new Int32Array(cluster.devices.length);
  for (const [host, block] of blocksOf(cluster, 0, used, counts)) blocks[host] = block;
  const filled = new Int32Array(cluster.devices.length);
  for (let device = 0; device < cluster.size; device++) {
    const rank = cluster.ranks ? cluster.ranks[device] : device;
    if (rank >= world) continue;
    const host = cluster.units[0][rank];
    const slot = blocks[host] * counts[0] + filled[host]++;
    rankAt[slot] = rank;
    slotOf[rank] = slot;
  }
  return { slots, rankAt, slotOf };
}
