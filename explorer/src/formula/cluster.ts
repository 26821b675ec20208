/**
 * The machine as nested levels: devices in hosts, hosts in domains, and which rank stands where.
 *
 *     Cluster.parse("host=2,leaf=2,spine=2", 8)     units[0]  0 0 1 1 2 2 3 3      the host of each rank
 *                                                   units[1]  0 0 0 0 1 1 1 1      its leaf
 *                                                   units[2]  0 0 0 0 0 0 0 0      its spine
 */
import { fill, integer, parseAxes, product } from "./axes";
import { clusterError, quoted } from "./messages";

/** A cluster as `rankmesh cluster --json` prints it. */
export interface ClusterData {
  levels: { name: string; latency?: number; bandwidth?: number }[];
  hosts: { name: string; devices: number; [level: string]: string | number }[];
  rank_map?: number[];
}

interface Host {
  readonly name: string;
  readonly devices: number;
  readonly places: readonly string[];
}

export class Cluster {
  /** The unit of each rank at each level, innermost first; units are numbered in the order of the hosts. */
  readonly units: readonly Int32Array[];
  /** The names of the units of each level. */
  readonly names: readonly (readonly string[])[];
  readonly size: number;
  /** Devices of a unit of each level, where all units of a level are alike and ranks ascend; else null. */
  readonly even: readonly number[] | null;
  /** Devices of each host. */
  readonly devices: readonly number[];
  /** The lowest rank in each unit of each level. */
  readonly lowest: readonly (readonly number[])[];
  /** The rank at each device, null when they ascend. */
  readonly ranks: Int32Array | null;

  constructor(
    readonly levels: readonly string[],
    hosts: readonly Host[],
    rankMap: readonly number[] | null = null,
  ) {
    this.devices = hosts.map((host) => host.devices);
    this.size = this.devices.reduce((total, devices) => total + devices, 0);
    this.ranks = rankMap ? Int32Array.from(rankMap) : null;
    const units = levels.map(() => new Int32Array(this.size));
    const names: string[][] = levels.map(() => []);
    const lowest: number[][] = levels.map(() => []);
    const numbers = levels.map(() => new Map<string, number>());
    let device = 0;
    hosts.forEach((host, number) => {
      const local = levels.map((_, level) => {
        const name = level ? host.places[level - 1] : `${number} ${host.name}`;
        const known = numbers[level].get(name);
        if (known !== undefined) return known;
        names[level].push(level ? name : host.name);
        lowest[level].push(this.size);
        numbers[level].set(name, names[level].length - 1);
        return names[level].length - 1;
      });
      for (let end = device + host.devices; device < end; device++) {
        const rank = this.ranks ? this.ranks[device] : device;
        for (let level = 0; level < local.length; level++) {
          units[level][rank] = local[level];
          if (rank < lowest[level][local[level]]) lowest[level][local[level]] = rank;
        }
      }
    });
    this.units = units;
    this.lowest = lowest;
    const sizes = lowest.map((ranks) => (ranks.length > 1 ? ranks[1] : this.size));
    const equal =
      !this.ranks && sizes.every((size, level) => lowest[level].every((rank, unit) => rank === unit * size));
    this.even = equal && sizes.every((size) => this.size % size === 0) ? sizes : null;
    this.names = names;
  }

  /** The cluster of an axis string of the machine; one size may be `*`: what the world leaves. */
  static parse(text: string, worldSize: number): Cluster {
    const sizes = fill(parseAxes(text), text.includes("*") ? worldSize : null, "world_size");
    const levels = [...sizes.keys()];
    const reserved = levels.find((name) => name === "name" || name === "devices");
    if (reserved !== undefined)
      throw clusterError(`${quoted(reserved)} cannot name a level; use letters, digits and underscores, such as leaf`);
    const [devices, ...outer] = sizes.values();
    if (product(sizes.values()) > 2 ** 22)
      throw clusterError(
        `${quoted(text)} has ${product(sizes.values())} devices, but the page draws up to ${2 ** 22}; lower a size`,
      );
    const hosts = Array.from({ length: product(outer) }, (_, number) => {
      let step = 1;
      const places = outer.map((size, level) => {
        step *= size;
        return `${levels[level + 1]}${Math.floor(number / step)}`;
      });
      return { name: `node${number}`, devices, places };
    });
    return new Cluster(levels, hosts);
  }

  /** Hosts of `width` devices in one network, the last one smaller where they do not divide the world. */
  static ofNodes(width: number, worldSize: number): Cluster {
    integer(width, "gpus_per_node", 1);
    const count = Math.ceil(worldSize / width);
    const hosts = Array.from({ length: count }, (_, number) => ({
      name: `node${number}`,
      devices: Math.min(width, worldSize - number * width),
      places: ["network0"],
    }));
    return new Cluster(count > 1 ? ["host", "network"] : ["host"], hosts);
  }

  static from(data: ClusterData): Cluster {
    const levels = data.levels.map((level) => level.name);
    const hosts = data.hosts.map((host) => ({
      name: host.name,
      devices: host.devices,
      places: levels.slice(1).map((level) => String(host[level])),
    }));
    return new Cluster(levels, hosts, data.rank_map ?? null);
  }

  /** Refuse a world that the cluster has too few devices for. */
  check(worldSize: number): this {
    if (worldSize > this.size)
      throw clusterError(
        `rank ${worldSize - 1} has no device: the cluster has ${this.size} devices, for ranks 0 to ` +
          `${this.size - 1}; give a cluster with a device for each rank`,
      );
    return this;
  }

  hostOf(rank: number): string {
    return this.names[0][this.units[0][rank]];
  }

  /** The number of the innermost level that two ranks share. */
  levelOf(left: number, right: number): number {
    let apart = 0;
    for (let level = 0; level < this.levels.length - 1; level++)
      if (this.units[level][left] !== this.units[level][right]) apart++;
    return apart;
  }

  /** The number of the innermost level that holds all of these ranks. */
  reach(ranks: ArrayLike<number>): number {
    let apart = 0;
    for (let place = 1; place < ranks.length; place++) apart = Math.max(apart, this.levelOf(ranks[0], ranks[place]));
    return apart;
  }

  /** Sizes in words: `288 devices, 36 hosts of 8, levels host nvlink leaf`. */
  toString(): string {
    const [least, most] = [Math.min(...this.devices), Math.max(...this.devices)];
    const each = least === most ? `${least}` : `${least} to ${most}`;
    const hosts = `${this.devices.length.toLocaleString("en")} host${this.devices.length === 1 ? "" : "s"}`;
    return `${this.size.toLocaleString("en")} devices, ${hosts} of ${each}, levels ${this.levels.join(" ")}`;
  }
}
