/**
 * What follows from a state: the plan, the cluster, and their facts, each taken when it is first asked for.
 */
import { Cluster } from "../formula/cluster";
import { communicators, type Communicators } from "../formula/communicators";
import { crossings, type Crossings } from "../formula/crossings";
import { Plan } from "../formula/plan";
import { read } from "../formula/source";
import { clusterError } from "../formula/messages";
import { GIVEN, type Given } from "./given";

export class Model {
  #crossings = new Map<string, Crossings>();
  #communicators: Communicators | null = null;

  constructor(
    readonly spec: string,
    readonly plan: Plan,
    readonly cluster: Cluster | null,
  ) {}

  /** The model of a SPEC on a cluster, or the error that Python raises. */
  static of(spec: string, world: number | null, cluster: string, given: Given): Model {
    const plan = spec === GIVEN && given.plan ? Plan.from(given.plan) : read(spec, world);
    return new Model(spec, plan, clusterOf(cluster, plan.worldSize, given));
  }

  get communicators(): Communicators {
    this.#communicators ??= communicators(this.plan);
    return this.#communicators;
  }

  /** How a kind lies on the hosts; kinds that are the same groups are looked at once. */
  crossings(kind: string): Crossings | null {
    if (!this.cluster) return null;
    const partition = this.plan.partition(kind);
    let found = this.#crossings.get(partition);
    if (!found) {
      found = crossings(this.plan.groups(kind), this.cluster);
      this.#crossings.set(partition, found);
    }
    return found;
  }

  /** The innermost level that holds every group of a kind. */
  levelOf(kind: string): string | null {
    const found = this.crossings(kind);
    return found && this.cluster!.levels[found.reach.findLastIndex((count) => count > 0)];
  }

  /** The number of the innermost level that holds one group; kinds whose groups all end at one level are not listed. */
  reachOf(kind: string, index: number): number {
    const { reach } = this.crossings(kind)!;
    const ends = reach.flatMap((count, level) => (count ? [level] : []));
    return ends.length === 1 ? ends[0] : this.cluster!.reach(this.plan.groups(kind).group(index));
  }

  /** The kinds worth a colour each: the first of each class that is the same groups, axes of the mesh before unions. */
  get leading(): string[] {
    const seen = new Set<string>();
    const byAxes = [...this.plan.specs].sort((a, b) => a.axes.length - b.axes.length);
    const first = byAxes.filter((each) => {
      const partition = this.plan.partition(each.name);
      if (seen.has(partition) || this.plan.groups(each.name).size === 1) return false;
      seen.add(partition);
      return true;
    });
    const single = first.filter((each) => each.axes.length === 1 && !each.pick && !each.levels);
    const order = [...this.plan.mesh.names, ...[...this.plan.mesh.views.values()].flatMap((view) => view.names)];
    return (single.length ? single : first.slice(0, 1))
      .sort((a, b) => order.indexOf(a.axes[0]) - order.indexOf(b.axes[0]))
      .map((each) => each.name);
  }

  has(rank: number): boolean {
    return this.plan.mesh.rankRange.has(rank);
  }
}

/** The last cluster, which stays when only the layout changes. */
let last: { key: string; cluster: Cluster | null } = { key: "", cluster: null };

function clusterOf(text: string, world: number, given: Given): Cluster | null {
  const key = `${text} ${world}`;
  if (key !== last.key) last = { key, cluster: newCluster(text, world, given) };
  return last.cluster;
}

function newCluster(text: string, world: number, given: Given): Cluster | null {
  if (!text) return null;
  if (text === GIVEN && given.cluster) return Cluster.from(given.cluster).check(world);
  if (/^\d+$/.test(text)) return Cluster.ofNodes(Number(text), world);
  if (!text.includes("="))
    throw clusterError(
      `cannot read cluster '${text}'; write devices a host (8), or levels from the inside (host=8,nvlink=9,leaf=*)`,
    );
  return Cluster.parse(text, world).check(world);
}
